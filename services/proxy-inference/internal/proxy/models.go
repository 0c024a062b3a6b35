package proxy

import (
	"encoding/json"
	"net/http"
	"slices"
	"strings"

	"github.com/cosmicac/cosmicac/services/proxy-inference/internal/route"
)

// model is one entry of OpenAI's list of models.
type model struct {
	ID      string `json:"id"`
	Object  string `json:"object"`
	Created int64  `json:"created"`
	OwnedBy string `json:"owned_by"`
}

// models answers GET /v1/models and /v1/models/{name}: what the key may use, by
// the names that requests use, whether it is ready or still loading.
func (c *call) models(name string) {
	if _, since := c.h.Routes.Status(); since.IsZero() {
		c.refuse(notReceived)
		return
	}
	endpoints := []*route.Endpoint{c.endpoint}
	if c.endpoint == nil {
		endpoints = c.h.Routes.OfProject(c.key.ProjectID)
	}
	list := []model{}
	for _, e := range endpoints {
		for _, id := range e.Models {
			m := model{ID: id, Object: "model", Created: max(e.CreatedAt.Unix(), 0), OwnedBy: "cosmicac"}
			if name == id {
				c.json(m)
				return
			}
			if !slices.ContainsFunc(list, func(m model) bool { return m.ID == id }) {
				list = append(list, m)
			}
		}
	}
	if name != "" {
		c.refuse(noModel(name))
		return
	}
	slices.SortFunc(list, func(a, b model) int { return strings.Compare(a.ID, b.ID) })
	c.json(struct {
		Object string  `json:"object"`
		Data   []model `json:"data"`
	}{"list", list})
}

func (c *call) json(v any) {
	body, err := json.Marshal(v)
	if err != nil {
		// Names of models marshal always; keep the shape all the same.
		body = []byte(`{"object":"list","data":[]}`)
	}
	c.status = http.StatusOK
	c.w.Header().Set("Content-Type", "application/json")
	c.w.Write(append(body, '\n'))
}
