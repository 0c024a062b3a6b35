package store

import (
	"context"
	"database/sql"
	"encoding/json"
)

// Image is a base image that jobs can name.
type Image struct {
	Name        string
	Reference   string
	DefaultUser string
	Description string
}

// Model is a model that a Managed Inference Job can serve.
type Model struct {
	ID          string
	Name        string
	Runtime     string
	Description string
	// Image is the base image of its VMs, by catalogue name.
	Image string
	// Arguments go to the engine when a job gives none.
	Arguments []string
	// GPUModel and GPUCount are a recommendation; empty and 0 for none.
	GPUModel string
	GPUCount int
}

// Location gives a location code a name for people.
type Location struct {
	Code string
	Name string
}

// Catalogue is everything a job can name.
type Catalogue struct {
	Images    []Image
	Models    []Model
	Locations []Location
}

// ReplaceCatalogue makes c the catalogue, in one step. Jobs made from entries
// that are gone keep what they were resolved to.
func (s *Store) ReplaceCatalogue(ctx context.Context, c Catalogue) error {
	return s.write(ctx, func(tx *sql.Tx) error {
		for _, table := range []string{"images", "models", "locations"} {
			if _, err := tx.ExecContext(ctx, "DELETE FROM "+table); err != nil {
				return err
			}
		}
		for i, image := range c.Images {
			if _, err := tx.ExecContext(ctx, "INSERT INTO images (name, position, reference, default_user, description) VALUES (?, ?, ?, ?, ?)",
				image.Name, i, image.Reference, image.DefaultUser, image.Description); err != nil {
				return err
			}
		}
		for i, m := range c.Models {
			arguments, err := json.Marshal(m.Arguments)
			if err != nil {
				return err
			}
			if _, err := tx.ExecContext(ctx, `INSERT INTO models (id, position, name, runtime, description, image, arguments, gpu_model, gpu_count)
				VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)`,
				m.ID, i, m.Name, m.Runtime, m.Description, m.Image, string(arguments), m.GPUModel, m.GPUCount); err != nil {
				return err
			}
		}
		for _, l := range c.Locations {
			if _, err := tx.ExecContext(ctx, "INSERT INTO locations (code, name) VALUES (?, ?)", l.Code, l.Name); err != nil {
				return err
			}
		}
		return nil
	})
}

// Catalogue reads the whole catalogue, in the operator's order.
func (s *Store) Catalogue(ctx context.Context) (c Catalogue, err error) {
	err = s.read(ctx, func(tx *sql.Tx) error {
		rows, err := tx.QueryContext(ctx, "SELECT name, reference, default_user, description FROM images ORDER BY position")
		err = each(rows, err, func(row scanner) error {
			var i Image
			err := row.Scan(&i.Name, &i.Reference, &i.DefaultUser, &i.Description)
			c.Images = append(c.Images, i)
			return err
		})
		if err != nil {
			return err
		}
		rows, err = tx.QueryContext(ctx, `SELECT id, name, runtime, description, image, arguments, gpu_model, gpu_count
			FROM models ORDER BY position`)
		err = each(rows, err, func(row scanner) error {
			var m Model
			var arguments string
			if err := row.Scan(&m.ID, &m.Name, &m.Runtime, &m.Description, &m.Image, &arguments, &m.GPUModel, &m.GPUCount); err != nil {
				return err
			}
			err := json.Unmarshal([]byte(arguments), &m.Arguments)
			c.Models = append(c.Models, m)
			return err
		})
		if err != nil {
			return err
		}
		rows, err = tx.QueryContext(ctx, "SELECT code, name FROM locations ORDER BY code")
		return each(rows, err, func(row scanner) error {
			var l Location
			err := row.Scan(&l.Code, &l.Name)
			c.Locations = append(c.Locations, l)
			return err
		})
	})
	return c, err
}
