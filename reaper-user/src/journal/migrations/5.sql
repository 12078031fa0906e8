-- The mode of the service: with `observe`, a decision to reap was not executed. Unknown for older decisions.
ALTER TABLE decision ADD COLUMN mode TEXT;
