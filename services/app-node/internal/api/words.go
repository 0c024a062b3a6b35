package api

import (
	"github.com/danielgtaylor/huma/v2"

	"github.com/cosmicac/cosmicac/pkg/lexicon"
)

// State is a state of a job, a replica or an attempt.
type State string

// Reason says why a state is what it is; empty for none.
type Reason string

// ConditionKind is what stands beside a state.
type ConditionKind string

// Schema names every state, with what it means.
func (State) Schema(huma.Registry) *huma.Schema { return words(lexicon.States(), false) }

// Schema names every reason, with what it means.
func (Reason) Schema(huma.Registry) *huma.Schema { return words(lexicon.Reasons(), true) }

// Schema names every kind of condition, with what it means.
func (ConditionKind) Schema(huma.Registry) *huma.Schema { return words(lexicon.Conditions(), false) }

// words is the schema of an enum of the wire.
func words(all []lexicon.Entry, none bool) *huma.Schema {
	s := &huma.Schema{Type: huma.TypeString}
	labels, means := map[string]string{}, map[string]string{}
	if none {
		s.Enum = append(s.Enum, "")
	}
	for _, e := range all {
		s.Enum = append(s.Enum, e.Name)
		labels[e.Name], means[e.Name] = e.Label, e.Means
	}
	s.Extensions = map[string]any{"x-labels": labels, "x-means": means}
	return s
}
