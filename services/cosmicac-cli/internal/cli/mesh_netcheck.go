package cli

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/trust"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
)

// netcheck is a check of the network as it is printed.
type netcheck struct {
	TookMS       float64            `json:"took_ms"`
	Listen       []string           `json:"listen_addresses"`
	Announced    []string           `json:"announced_addresses"`
	Observed     []netcheckSight    `json:"observed_addresses"`
	UDP          string             `json:"udp"`
	IPv6         string             `json:"ipv6"`
	NAT          string             `json:"nat"`
	NATReason    string             `json:"nat_reason"`
	Private      bool               `json:"private"`
	DialBacks    []netcheckDialBack `json:"dial_backs"`
	Reservations []netcheckRelay    `json:"reservations"`
	Bootstraps   []netcheckBoot     `json:"bootstraps"`
}

type netcheckSight struct {
	Address   string `json:"address"`
	Local     string `json:"local_address"`
	Transport string `json:"transport"`
	Observer  string `json:"observer"`
}

type netcheckDialBack struct {
	Address   string     `json:"address"`
	Result    string     `json:"result"`
	Reason    string     `json:"reason,omitempty"`
	CheckedAt *time.Time `json:"checked_at,omitempty"`
}

type netcheckRelay struct {
	Name    string `json:"name"`
	Key     string `json:"key"`
	Address string `json:"address"`
}

type netcheckBoot struct {
	Name         string            `json:"name"`
	Key          string            `json:"key"`
	Answers      bool              `json:"answers"`
	Reason       string            `json:"reason,omitempty"`
	ClockAheadMS *float64          `json:"clock_ahead_ms,omitempty"`
	Addresses    []netcheckAddress `json:"addresses"`
}

type netcheckAddress struct {
	Address     string  `json:"address"`
	Transport   string  `json:"transport"`
	Answers     bool    `json:"answers"`
	Reason      string  `json:"reason,omitempty"`
	ConnectMS   float64 `json:"connect_ms"`
	RoundTripMS float64 `json:"round_trip_ms"`
}

func netcheckOf(c *meshv1.CheckNetworkResponse, network *trust.Network) *netcheck {
	nameOf := func(key string) string {
		for _, m := range network.Roster().GetMembers() {
			if m.GetKey() == key {
				return m.GetName()
			}
		}
		return key
	}
	v := &netcheck{TookMS: milliseconds(c.GetTookMicroseconds()), Listen: append([]string{}, c.GetListenAddresses()...), Announced: append([]string{}, c.GetAnnouncedAddresses()...),
		UDP: c.GetUdp(), IPv6: c.GetIpv6(), NAT: c.GetNat(), NATReason: c.GetNatReason(), Private: c.GetPrivate(),
		Observed: []netcheckSight{}, DialBacks: []netcheckDialBack{}, Reservations: []netcheckRelay{}, Bootstraps: []netcheckBoot{}}
	for _, o := range c.GetObservedAddresses() {
		v.Observed = append(v.Observed, netcheckSight{o.GetAddress(), o.GetLocalAddress(), o.GetTransport(), nameOf(o.GetObserver())})
	}
	for _, d := range c.GetDialBacks() {
		back := netcheckDialBack{Address: d.GetAddress(), Result: d.GetResult(), Reason: d.GetReason()}
		if d.GetCheckedAt() != nil {
			at := d.GetCheckedAt().AsTime()
			back.CheckedAt = &at
		}
		v.DialBacks = append(v.DialBacks, back)
	}
	for _, r := range c.GetReservations() {
		v.Reservations = append(v.Reservations, netcheckRelay{nameOf(r.GetRelayKey()), r.GetRelayKey(), r.GetAddress()})
	}
	for _, b := range c.GetBootstraps() {
		boot := netcheckBoot{Name: nameOf(b.GetKey()), Key: b.GetKey(), Answers: b.GetAnswers(), Reason: b.GetReason(), Addresses: []netcheckAddress{}}
		if b.GetAnswers() {
			ahead := milliseconds(b.GetClockAheadMicroseconds())
			boot.ClockAheadMS = &ahead
		}
		for _, a := range b.GetAddresses() {
			boot.Addresses = append(boot.Addresses, netcheckAddress{a.GetAddress(), a.GetTransport(), a.GetAnswers(), a.GetReason(),
				milliseconds(a.GetConnectMicroseconds()), milliseconds(a.GetRoundTripMicroseconds())})
		}
		v.Bootstraps = append(v.Bootstraps, boot)
	}
	return v
}

// answering counts the bootstraps that answer.
func (v *netcheck) answering() (count int) {
	for _, b := range v.Bootstraps {
		if b.Answers {
			count++
		}
	}
	return count
}

func (v *netcheck) table(t *tableWriter) {
	list := func(addresses []string) string { return orDash(strings.Join(addresses, " ")) }
	t.row("listens on", list(v.Listen))
	t.row("announces", list(v.Announced))
	for _, o := range v.Observed {
		t.row("seen by "+o.Observer, o.Address+" (from "+o.Local+")")
	}
	t.row("UDP", v.UDP)
	t.row("IPv6", v.IPv6)
	t.row("NAT", strings.ReplaceAll(v.NAT, "_", " ")+": "+v.NATReason)
	switch {
	case v.Private && len(v.Reservations) == 0:
		t.row("relay", "no reservation is held, although this node is private: nobody reaches it")
	case v.Private:
		for _, r := range v.Reservations {
			t.row("relay", "a reservation at "+r.Name)
		}
	default:
		t.row("relay", "none wanted, this node is public")
	}
	for _, d := range v.DialBacks {
		text := d.Address + ": " + d.Result
		if d.Reason != "" {
			text += ", " + d.Reason
		}
		t.row("dialed back", text)
	}
	for _, b := range v.Bootstraps {
		if b.Answers {
			t.row("bootstrap "+b.Name, fmt.Sprintf("answers, its clock is %s", skewText(*b.ClockAheadMS)))
		} else {
			t.row("bootstrap "+b.Name, "does not answer: "+b.Reason)
		}
		for _, a := range b.Addresses {
			if a.Answers {
				t.row("", fmt.Sprintf("%s answers in %.1f ms, connected in %.1f ms", a.Address, a.RoundTripMS, a.ConnectMS))
			} else {
				t.row("", a.Address+": "+a.Reason)
			}
		}
	}
	if len(v.Bootstraps) == 0 {
		t.row("bootstraps", "none but this node itself")
	}
}

// skewText is how far a clock is off, for people.
func skewText(aheadMS float64) string {
	d := time.Duration(aheadMS * float64(time.Millisecond))
	switch {
	case d.Abs() < 100*time.Millisecond:
		return "the same"
	case d > 0:
		return d.Round(10*time.Millisecond).String() + " ahead"
	}
	return (-d).Round(10*time.Millisecond).String() + " behind"
}

func (e *environment) netcheckCommand(operator *string) *cobra.Command {
	c := &cobra.Command{Use: "netcheck", Short: "What a node sees of the network it stands in: addresses, UDP, IPv6, NAT, bootstraps, relays, clocks", Args: cobra.NoArgs}
	from := fromFlag(c)
	c.RunE = func(cmd *cobra.Command, _ []string) error {
		return e.lookFrom(cmd.Context(), *operator, *from, 45*time.Second, func(ctx context.Context, v vantage, network *trust.Network) error {
			found, err := v.CheckNetwork(ctx, &meshv1.CheckNetworkRequest{})
			if err != nil {
				return err
			}
			view := netcheckOf(found, network)
			if err := e.print(view, view.table); err != nil {
				return err
			}
			if len(view.Bootstraps) > 0 && view.answering() == 0 {
				return fault.New(fault.Unreachable, "none of %d bootstraps answers", len(view.Bootstraps))
			}
			return nil
		})
	}
	return c
}
