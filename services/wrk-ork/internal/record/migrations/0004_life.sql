ALTER TABLE replicas ADD COLUMN start_failures INTEGER NOT NULL DEFAULT 0;

ALTER TABLE racks ADD COLUMN type TEXT NOT NULL DEFAULT 'server-k8s-nvidia';
-- Zero while the rack is not drained.
ALTER TABLE racks ADD COLUMN drain_since INTEGER NOT NULL DEFAULT 0;
ALTER TABLE racks ADD COLUMN drain_deadline INTEGER NOT NULL DEFAULT 0;
ALTER TABLE racks ADD COLUMN drain_actor TEXT NOT NULL DEFAULT '';

-- Attempts that a node could not start, with the cluster's words.
CREATE TABLE start_failures (
  rack_id    TEXT NOT NULL,
  node       TEXT NOT NULL,
  model      TEXT NOT NULL,
  attempt_id TEXT NOT NULL,
  job_id     TEXT NOT NULL,
  time       INTEGER NOT NULL,
  reason     INTEGER NOT NULL,
  message    TEXT NOT NULL,
  gpu_uuids  TEXT NOT NULL,
  PRIMARY KEY (attempt_id, node)
) STRICT, WITHOUT ROWID;
CREATE INDEX start_failures_by_node ON start_failures (rack_id, node, model, time);

-- Nodes and models that are left out of placement. An empty model is the node.
CREATE TABLE quarantines (
  rack_id TEXT NOT NULL,
  node    TEXT NOT NULL,
  model   TEXT NOT NULL,
  since   INTEGER NOT NULL,
  actor   TEXT NOT NULL,
  message TEXT NOT NULL,
  PRIMARY KEY (rack_id, node, model)
) STRICT, WITHOUT ROWID;

-- Racks that were removed by force, until somebody decided about what was left.
CREATE TABLE forgotten_racks (
  rack_id TEXT PRIMARY KEY,
  key     TEXT NOT NULL,
  doc     TEXT NOT NULL
) STRICT;
