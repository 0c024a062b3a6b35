package api

import (
	"context"
	"strings"
	"time"

	"github.com/cosmicac/cosmicac/pkg/lexicon"
)

// MeshNode is one daemon of the network.
type MeshNode struct {
	Key          string     `json:"key"`
	Name         string     `json:"name"`
	Roles        []string   `json:"roles"`
	State        string     `json:"state" enum:"answers,silent" doc:"Of a silent one only key, name and roles are known"`
	Reason       string     `json:"reason" doc:"Why it is silent: a kind of fault"`
	Version      string     `json:"version"`
	Ready        bool       `json:"ready"`
	StartedAt    *time.Time `json:"started_at,omitempty"`
	ClockAheadMS float64    `json:"clock_ahead_ms" doc:"How far its clock is ahead of app-node's"`
	PeersKnown   bool       `json:"peers_known" doc:"It said whom it is connected to; links and counts are only partly known otherwise"`
	Agents       int        `json:"agents" doc:"Connections to agents"`
	Clients      int        `json:"clients" doc:"Connections to people's command lines"`
	Others       int        `json:"others" doc:"Connections to operators and to keys that are not admitted"`
	Warnings     []Warning  `json:"warnings"`
}

// MeshLink is how two daemons are connected; there is one for each pair.
type MeshLink struct {
	From                  string     `json:"from" doc:"Key of the daemon that dialed"`
	To                    string     `json:"to" doc:"Key of the daemon that was dialed"`
	Path                  string     `json:"path" enum:"direct,relay"`
	Transport             string     `json:"transport" doc:"tcp or quic"`
	Address               string     `json:"address" doc:"Of the far end, as the reporting daemon sees it"`
	RoundTripMicroseconds int64      `json:"round_trip_microseconds" doc:"0 when it was not measured"`
	ConnectedAt           *time.Time `json:"connected_at,omitempty"`
	Suspect               bool       `json:"suspect" doc:"Silent for 2 s"`
	Connections           int        `json:"connections" doc:"How many stand between the two"`
	SeenBy                string     `json:"seen_by" enum:"both,from,to" doc:"Who reported it"`
}

type meshOutput struct {
	Body struct {
		Complete bool       `json:"complete" doc:"Every daemon answered; otherwise this is a part of the picture"`
		AskedAt  time.Time  `json:"asked_at"`
		Nodes    []MeshNode `json:"nodes"`
		Links    []MeshLink `json:"links"`
	}
}

// mesh is shaped for drawing: nodes by key, links between their keys.
func (s *Server) mesh(ctx context.Context, _ *struct{}) (*meshOutput, error) {
	mesh, err := s.Fleet.Mesh(ctx)
	if err != nil {
		return nil, err
	}
	out := &meshOutput{}
	b := &out.Body
	b.Complete, b.AskedAt, b.Nodes, b.Links = mesh.Complete, mesh.AskedAt, []MeshNode{}, []MeshLink{}
	for _, n := range mesh.Nodes {
		node := MeshNode{Key: n.Key, Name: n.Name, Roles: []string{}, State: "answers", Reason: n.Reason, PeersKnown: n.PeersKnown,
			Agents: n.Agents, Clients: n.Clients, Others: n.Others, Warnings: []Warning{}}
		for _, role := range n.Roles {
			node.Roles = append(node.Roles, strings.ReplaceAll(lexicon.Name(role), "_", "-"))
		}
		if n.Info == nil {
			node.State = "silent"
		} else {
			node.Version, node.Ready, node.StartedAt = n.Info.GetVersion(), n.Info.GetReady(), stamp(n.Info.GetStartedAt())
			node.ClockAheadMS = float64(n.ClockAhead.Microseconds()) / 1000
		}
		for _, w := range n.Info.GetWarnings() {
			node.Warnings = append(node.Warnings, Warning{Daemon: n.Name, Code: w.GetCode(), Severity: w.GetSeverity(), Text: w.GetText(), Remedy: w.GetRemedy(), Since: stamp(w.GetSince())})
		}
		b.Nodes = append(b.Nodes, node)
	}
	for _, l := range mesh.Links {
		link := MeshLink{From: l.From, To: l.To, Path: "direct", Transport: l.Peer.GetTransport(), Address: l.Peer.GetAddress(),
			RoundTripMicroseconds: l.Peer.GetRoundTripMicroseconds(), ConnectedAt: stamp(l.Peer.GetConnectedAt()), Suspect: l.Peer.GetSuspect(),
			Connections: l.Connections, SeenBy: "both"}
		if l.Peer.GetRelayed() {
			link.Path = "relay"
		}
		switch {
		case !l.SeenByTo:
			link.SeenBy = "from"
		case !l.SeenByFrom:
			link.SeenBy = "to"
		}
		b.Links = append(b.Links, link)
	}
	return out, nil
}
