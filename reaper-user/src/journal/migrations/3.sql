-- Times are nanoseconds since the epoch, but `start`, which is since boot and a process's name together
-- with its pid and boot.
CREATE TABLE boot (
    id INTEGER PRIMARY KEY,
    uuid TEXT NOT NULL UNIQUE
) STRICT;

CREATE TABLE process (
    id INTEGER PRIMARY KEY,
    boot INTEGER NOT NULL REFERENCES boot,
    pid INTEGER NOT NULL,
    start INTEGER NOT NULL,
    -- That it was last a member of.
    session INTEGER REFERENCES session,
    uid INTEGER NOT NULL,
    comm TEXT NOT NULL,
    exe TEXT NOT NULL,
    -- A JSON array, secrets taken out.
    args TEXT NOT NULL,
    UNIQUE (boot, pid, start)
) STRICT;
CREATE INDEX process_session ON process (session);

CREATE TABLE session (
    id INTEGER PRIMARY KEY,
    boot INTEGER NOT NULL REFERENCES boot,
    -- Of the process that was its root first.
    pid INTEGER NOT NULL,
    start INTEGER NOT NULL,
    agent TEXT NOT NULL,
    -- The process that was its root last; NULL where nobody told.
    root INTEGER REFERENCES process,
    -- The session that it is nested in.
    outer INTEGER REFERENCES session,
    uid INTEGER,
    opened INTEGER NOT NULL,
    -- When the last word was heard of it.
    seen INTEGER NOT NULL,
    gone INTEGER,
    exit_code INTEGER,
    exit_signal TEXT,
    closed INTEGER,
    reaped INTEGER NOT NULL DEFAULT 0,
    kept INTEGER NOT NULL DEFAULT 0,
    failed INTEGER NOT NULL DEFAULT 0,
    lost_before INTEGER NOT NULL DEFAULT 0,
    rss INTEGER NOT NULL DEFAULT 0,
    pss INTEGER NOT NULL DEFAULT 0,
    swap INTEGER NOT NULL DEFAULT 0,
    unread INTEGER NOT NULL DEFAULT 0,
    UNIQUE (boot, pid, start)
) STRICT;
CREATE INDEX session_seen ON session (seen);
CREATE INDEX session_root ON session (root);

CREATE TABLE decision (
    id INTEGER PRIMARY KEY,
    process INTEGER NOT NULL REFERENCES process,
    time INTEGER NOT NULL,
    verdict TEXT NOT NULL,
    reason TEXT NOT NULL,
    rule TEXT
) STRICT;
CREATE INDEX decision_process ON decision (process);
CREATE INDEX decision_time ON decision (time);

CREATE TABLE outcome (
    id INTEGER PRIMARY KEY,
    process INTEGER NOT NULL REFERENCES process,
    time INTEGER NOT NULL,
    outcome TEXT NOT NULL,
    reason TEXT,
    signal TEXT,
    exit_code INTEGER,
    exit_signal TEXT,
    -- Nanoseconds from the first signal.
    duration INTEGER,
    -- Bytes it had right after that.
    rss INTEGER,
    pss INTEGER,
    swap INTEGER
) STRICT;
CREATE INDEX outcome_process ON outcome (process);
CREATE INDEX outcome_time ON outcome (time);

-- How many records are not here, because they came faster than they could be written.
CREATE TABLE dropped (
    id INTEGER PRIMARY KEY,
    time INTEGER NOT NULL,
    count INTEGER NOT NULL
) STRICT;

-- What users have asked to be kept.
CREATE TABLE keep (
    boot INTEGER NOT NULL REFERENCES boot,
    pid INTEGER NOT NULL,
    start INTEGER NOT NULL,
    -- It was asked for, and is not kept for one that it descends from.
    asked INTEGER NOT NULL,
    tree INTEGER NOT NULL,
    by_uid INTEGER NOT NULL,
    made INTEGER NOT NULL,
    -- On the clock that stands still in suspend, in nanoseconds; NULL is for good.
    until_awake INTEGER,
    until INTEGER,
    -- The first root of its session.
    session_pid INTEGER NOT NULL,
    session_start INTEGER NOT NULL,
    -- Several wishes may be for one process; each is told by who made it when.
    PRIMARY KEY (boot, pid, start, by_uid, made)
) STRICT;
