package cli

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/libp2p/go-libp2p/core/peer"
	"github.com/spf13/cobra"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/identity"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	"github.com/cosmicac/cosmicac/pkg/trust"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
)

func (e *environment) meshCommand() *cobra.Command {
	var operator string
	c := &cobra.Command{Use: "mesh", Short: "See the peer-to-peer network as an operator", Args: cobra.NoArgs, RunE: helpOnly}
	c.PersistentFlags().StringVar(&operator, "operator", "", "operator folder (default: COSMICAC_OPERATOR_DIR, /etc/cosmicac/operator)")

	find := &cobra.Command{
		Use: "find MEMBER|ROLE|KEY", Short: "Where members and agents are", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return withOperator(cmd.Context(), operator, func(node *mesh.Node, _ string) error {
				var cards []*meshv1.Card
				if role, err := parseRole(args[0]); err == nil {
					if cards, err = node.FindRole(cmd.Context(), role); err != nil {
						return err
					}
				} else if p, err := identity.ParseID(args[0]); err == nil && !listed(node.Network(), p) {
					card, err := node.FindCard(cmd.Context(), p) // an agent, or nobody
					if err != nil {
						return err
					}
					cards = append(cards, card)
				} else {
					members, err := findDaemons(node.Network(), args[0])
					if err != nil {
						return err
					}
					all, err := node.FindRole(cmd.Context(), members[0].GetRoles()[0])
					if err != nil {
						return err
					}
					for _, card := range all {
						if card.GetKey() == members[0].GetKey() {
							cards = append(cards, card)
						}
					}
				}
				return e.print(map[string]any{"cards": cards}, func(t *tableWriter) {
					t.row("NAME", "ROLE", "KEY", "VERSION", "ADDRESSES")
					for _, card := range cards {
						t.row(orDash(card.GetName()), roleText(card.GetRole()), card.GetKey(), orDash(card.GetVersion()), strings.Join(card.GetAddresses(), " "))
					}
				})
			})
		},
	}
	peers := &cobra.Command{
		Use: "peers [MEMBER]", Short: "Whom a member is connected to (default: every member's links)", Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return withOperator(cmd.Context(), operator, func(node *mesh.Node, _ string) error {
				members := node.Network().Roster().GetMembers()
				if len(args) == 1 {
					var err error
					if members, err = findDaemons(node.Network(), args[0]); err != nil {
						return err
					}
				}
				type link struct {
					From string       `json:"from"`
					Peer *meshv1.Peer `json:"peer"`
				}
				var links []link
				for _, m := range members {
					p, err := peerOf(m)
					if err != nil || p == node.ID() {
						continue
					}
					ctx, cancel := context.WithTimeout(cmd.Context(), 10*time.Second)
					r, err := meshv1.NewNodeClient(node.Client(p)).ListPeers(ctx, &meshv1.ListPeersRequest{})
					cancel()
					if err != nil {
						fmt.Fprintf(e.err, "%s: %v\n", m.GetName(), err)
						continue
					}
					for _, q := range r.GetPeers() {
						links = append(links, link{m.GetName(), q})
					}
				}
				return e.print(map[string]any{"links": links}, func(t *tableWriter) {
					t.row("FROM", "TO", "CLASS", "TRANSPORT", "RELAYED", "ROUND TRIP", "ADDRESS")
					for _, l := range links {
						to := l.Peer.GetName()
						if to == "" {
							to = l.Peer.GetKey()
						}
						t.row(l.From, to, strings.ToLower(strings.TrimPrefix(l.Peer.GetClass().String(), "CLASS_")), l.Peer.GetTransport(), l.Peer.GetRelayed(),
							fmt.Sprintf("%.1f ms", float64(l.Peer.GetRoundTripMicroseconds())/1000), l.Peer.GetAddress())
					}
				})
			})
		},
	}
	c.AddCommand(e.pingCommand(&operator), find, peers, e.traceCommand(&operator), e.netcheckCommand(&operator), e.speedtestCommand(&operator))
	return c
}

func listed(network *trust.Network, p peer.ID) bool {
	_, ok := network.Known(p)
	return ok
}

func (e *environment) doctorCommand() *cobra.Command {
	var operator string
	c := &cobra.Command{
		Use: "doctor", Short: "Ask every daemon what is wrong, and say what to do", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return withOperator(cmd.Context(), operator, func(node *mesh.Node, _ string) error {
				type finding struct {
					Daemon   string `json:"daemon"`
					Severity string `json:"severity"`
					Code     string `json:"code"`
					Text     string `json:"text"`
					Remedy   string `json:"remedy"`
				}
				var findings []finding
				healthy := 0
				roster := node.Network().Roster()
				for _, m := range roster.GetMembers() {
					p, err := identity.ParseID(m.GetKey())
					if err != nil || p == node.ID() {
						continue
					}
					ctx, cancel := context.WithTimeout(cmd.Context(), 10*time.Second)
					info, err := meshv1.NewNodeClient(node.Client(p)).GetInfo(ctx, &meshv1.GetInfoRequest{})
					cancel()
					if err != nil {
						findings = append(findings, finding{m.GetName(), "error", "not_answering", err.Error(), "look at its unit and its log on its host"})
						continue
					}
					if skew := time.Since(info.GetNow().AsTime()); skew > time.Minute || skew < -time.Minute {
						findings = append(findings, finding{m.GetName(), "warning", "clock_skew", fmt.Sprintf("its clock is %s off this host's", skew.Round(time.Second)), "set the time by NTP"})
					}
					if info.GetRosterVersion() < roster.GetVersion() {
						findings = append(findings, finding{m.GetName(), "warning", "old_roster", fmt.Sprintf("it holds roster %d, the newest is %d", info.GetRosterVersion(), roster.GetVersion()), "wait some seconds; then look at its links with cosmicac mesh peers"})
					}
					for _, w := range info.GetWarnings() {
						findings = append(findings, finding{m.GetName(), w.GetSeverity(), w.GetCode(), w.GetText(), w.GetRemedy()})
					}
					if !info.GetReady() {
						findings = append(findings, finding{m.GetName(), "warning", "not_ready", "it runs but is not ready", "look at its log: " + info.GetLogFile()})
					}
					healthy++
				}
				if err := e.print(map[string]any{"findings": findings}, func(t *tableWriter) {
					if len(findings) == 0 {
						t.row(fmt.Sprintf("%d daemons answer and report nothing wrong", healthy))
						return
					}
					t.row("DAEMON", "SEVERITY", "CODE", "WHAT", "REMEDY")
					for _, f := range findings {
						t.row(f.Daemon, f.Severity, f.Code, f.Text, f.Remedy)
					}
				}); err != nil {
					return err
				}
				for _, f := range findings {
					if f.Severity == "error" {
						return fault.New(fault.FailedPrecondition, "%s: %s", f.Daemon, f.Text)
					}
				}
				return nil
			})
		},
	}
	c.Flags().StringVar(&operator, "operator", "", "operator folder (default: COSMICAC_OPERATOR_DIR, /etc/cosmicac/operator)")
	c.AddCommand(e.leaksCommand())
	return c
}
