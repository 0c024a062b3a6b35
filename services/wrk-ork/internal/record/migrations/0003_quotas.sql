-- How many GPUs a project may hold at once, as app-node says. What is not here is
-- not known, and blocks.
CREATE TABLE quotas (
  project_id   TEXT PRIMARY KEY,
  revision     INTEGER NOT NULL,
  unlimited    INTEGER NOT NULL,
  maximum_gpus INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- A newer word stays, whatever the code above does.
CREATE TRIGGER quotas_only_newer BEFORE UPDATE ON quotas
WHEN NEW.revision < OLD.revision
BEGIN
  SELECT RAISE(ABORT, 'the revision of a quota never falls');
END;

-- The GPUs of an attempt's plan, written with the plan.
ALTER TABLE attempts ADD COLUMN gpus INTEGER NOT NULL DEFAULT 0;
UPDATE attempts SET gpus = (SELECT coalesce(sum(json_extract(n.value, '$.gpuCount')), 0) FROM json_each(attempts.doc, '$.nodes.nodes') n);

-- What a VM may take of an NVSwitch board, as JSON; empty for one or all.
ALTER TABLE racks ADD COLUMN board_gpu_counts TEXT NOT NULL DEFAULT '[]';
