-- How much a project's volumes may hold together; NULL for no bound. The revision
-- is that of the whole quota.
ALTER TABLE projects ADD COLUMN maximum_volume_gib INTEGER;
