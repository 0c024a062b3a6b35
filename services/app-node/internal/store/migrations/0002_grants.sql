-- The one number that grants are signed under. It grows with each revocation.
CREATE TABLE grant_epoch (
  one   INTEGER PRIMARY KEY CHECK (one = 1),
  value INTEGER NOT NULL
) STRICT;
INSERT INTO grant_epoch (one, value) VALUES (1, 1);

CREATE TRIGGER grant_epoch_only_grows BEFORE UPDATE ON grant_epoch
WHEN NEW.value < OLD.value
BEGIN
  SELECT RAISE(ABORT, 'the epoch of grants only grows');
END;

-- A user's grants for a project's jobs that were signed below an epoch are void.
-- An empty project stands for every project.
CREATE TABLE grant_floors (
  user_id    TEXT NOT NULL,
  project_id TEXT NOT NULL,
  epoch      INTEGER NOT NULL,
  raised_at  INTEGER NOT NULL,
  PRIMARY KEY (user_id, project_id)
) STRICT, WITHOUT ROWID;

-- Who leaves a project loses what they hold there, whatever code removes them.
CREATE TRIGGER memberships_removed AFTER DELETE ON memberships
BEGIN
  UPDATE grant_epoch SET value = value + 1;
  INSERT INTO grant_floors (user_id, project_id, epoch, raised_at)
    SELECT OLD.user_id, OLD.project_id, value, unixepoch() * 1000 FROM grant_epoch WHERE true
    ON CONFLICT (user_id, project_id) DO UPDATE SET epoch = excluded.epoch, raised_at = excluded.raised_at;
END;
