-- Grants signed below an epoch are void. An empty project or user stands for all.
CREATE TABLE grant_floors (
  project_id TEXT NOT NULL,
  user_id    TEXT NOT NULL,
  epoch      INTEGER NOT NULL,
  until      INTEGER NOT NULL,
  PRIMARY KEY (project_id, user_id)
) STRICT, WITHOUT ROWID;

-- A floor never falls, whatever the code above does.
CREATE TRIGGER grant_floors_only_rise BEFORE UPDATE ON grant_floors
WHEN NEW.epoch < OLD.epoch OR NEW.until < OLD.until
BEGIN
  SELECT RAISE(ABORT, 'a floor of grants never falls');
END;

-- Attempts whose certificates are void and may still be in date.
CREATE TABLE void_certificates (
  attempt_id TEXT PRIMARY KEY,
  until      INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- The VM that a token was redeemed in.
ALTER TABLE join_tokens ADD COLUMN vmi_uid TEXT NOT NULL DEFAULT '';
