package proxy

import (
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/cosmicac/cosmicac/pkg/id"
	appv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/app/v1"
)

// record writes one record of a request that was let through to an endpoint,
// however it ended. Requests refused before that (no key, no such model, over a
// limit) are counted in metrics alone, so that a flood of them fills no ledger.
func (c *call) record() {
	m := ""
	if servesModel(c.endpoint, c.model) {
		m = c.model
	} else if len(c.endpoint.Models) > 0 {
		m = c.endpoint.Models[0]
	}
	c.h.Record(&appv1.UsageRecord{
		Id:                     id.Usage + "-" + randomText(c.h.Random),
		ApiKeyId:               c.key.ID,
		ProjectId:              c.endpoint.ProjectID,
		EndpointId:             c.endpoint.ID,
		Model:                  m,
		Time:                   timestamppb.New(c.start),
		PromptTokens:           c.usage.PromptTokens,
		CompletionTokens:       c.usage.CompletionTokens,
		HttpStatus:             uint32(c.status),
		DurationMilliseconds:   milliseconds(c.h.Now().Sub(c.start)),
		FirstTokenMilliseconds: milliseconds(c.firstByte),
		Incomplete:             c.incomplete,
	})
}

func milliseconds(d time.Duration) uint64 { return uint64(max(d.Milliseconds(), 0)) }
