-- How many GPUs the jobs of a project may hold at once; NULL for no bound. The
-- orchestrator keeps the setting with the highest revision that it was told.
ALTER TABLE projects ADD COLUMN maximum_gpus INTEGER;
ALTER TABLE projects ADD COLUMN quota_revision INTEGER NOT NULL DEFAULT 1;
