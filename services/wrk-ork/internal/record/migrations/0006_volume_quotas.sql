-- How much a project's volumes may hold together; NULL for no bound.
ALTER TABLE quotas ADD COLUMN maximum_volume_gib INTEGER;
