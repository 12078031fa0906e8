-- Ancestors up to the agent at a decision, nearest first, as a JSON array; NULL if unknown.
ALTER TABLE process ADD COLUMN lineage TEXT;

-- Requests of users to keep a process, or to keep it no longer.
CREATE TABLE request (
    id INTEGER PRIMARY KEY,
    process INTEGER NOT NULL REFERENCES process,
    time INTEGER NOT NULL,
    -- `keep` or `unkeep`.
    request TEXT NOT NULL,
    by_uid INTEGER NOT NULL,
    -- Whether descendants are kept too; NULL for `unkeep`.
    tree INTEGER,
    -- Expected end; NULL if there is none.
    until INTEGER
) STRICT;
CREATE INDEX request_process ON request (process);
CREATE INDEX request_time ON request (time);
