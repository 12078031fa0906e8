-- Time and status of the exit of a process that was decided about; unknown for earlier exits.
ALTER TABLE process ADD COLUMN exited INTEGER;
ALTER TABLE process ADD COLUMN exit_code INTEGER;
ALTER TABLE process ADD COLUMN exit_signal TEXT;
