-- Volumes: disks of a project in one rack that outlive jobs.
CREATE TABLE volumes (
  id                  TEXT PRIMARY KEY,
  project_id          TEXT NOT NULL,
  user_id             TEXT NOT NULL,
  name                TEXT NOT NULL,
  rack_id             TEXT NOT NULL,
  size_gib            INTEGER NOT NULL,
  storage_class       TEXT NOT NULL,
  shared              INTEGER NOT NULL,
  state               INTEGER NOT NULL,
  message             TEXT NOT NULL,
  created_at          INTEGER NOT NULL,
  delete_requested_at INTEGER NOT NULL,
  UNIQUE (project_id, name)
) STRICT;
CREATE INDEX volumes_by_rack ON volumes (rack_id);

-- Who has which volume.
CREATE TABLE volume_attachments (
  volume_id TEXT NOT NULL,
  job_id    TEXT NOT NULL,
  read_only INTEGER NOT NULL,
  PRIMARY KEY (volume_id, job_id)
) STRICT, WITHOUT ROWID;
CREATE INDEX volume_attachments_by_job ON volume_attachments (job_id);

-- One that writes has a volume alone, whatever the code above does.
CREATE TRIGGER volume_attachments_one_writer BEFORE INSERT ON volume_attachments
WHEN EXISTS (SELECT 1 FROM volume_attachments a JOIN volumes v ON v.id = a.volume_id
  WHERE a.volume_id = NEW.volume_id AND a.job_id <> NEW.job_id AND (v.shared = 0 OR a.read_only = 0 OR NEW.read_only = 0))
BEGIN
  SELECT RAISE(ABORT, 'a volume that is written has one job');
END;
