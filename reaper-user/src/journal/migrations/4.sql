-- Renames reasons as the event stream does, so that old decisions and outcomes read like new ones.
CREATE TEMP TABLE renamed (old TEXT PRIMARY KEY, new TEXT NOT NULL) STRICT;
INSERT INTO renamed (old, new) VALUES
    ('keep_mark', 'keep_marker'),
    ('lineage_unsure', 'lineage_uncertain'),
    ('root_gone', 'root_exited'),
    ('shared_mark', 'shared_marker');
UPDATE decision SET reason = new FROM renamed WHERE reason = old;
UPDATE outcome SET reason = new FROM renamed WHERE reason = old;
DROP TABLE temp.renamed;
