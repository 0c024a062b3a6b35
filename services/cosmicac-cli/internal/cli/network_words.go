package cli

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/cosmicac/cosmicac/pkg/identity"
	"github.com/cosmicac/cosmicac/pkg/trust"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
)

// content is what records say, without their versions and times.
type content struct {
	members    []*meshv1.Member
	bootstraps []*meshv1.BootstrapAddress
	roots      []string
}

func contentOf(n *trust.Network) content {
	return content{n.Roster().GetMembers(), n.Info().GetBootstraps(), n.RootKeys()}
}

// asked is what a request would make of its base.
func asked(r *meshv1.ChangeRequest, base *trust.Network) content {
	c := contentOf(base)
	if r.GetSignRoster() || r.GetRotateRootKeys() {
		c.members = r.GetMembers()
	}
	if r.GetSignNetworkInfo() || r.GetRotateRootKeys() {
		c.bootstraps = r.GetBootstraps()
	}
	return c
}

// differences says in words what changes from one to the other, one line each.
func differences(from, to content) []string {
	var lines []string
	say := func(format string, a ...any) { lines = append(lines, printable(fmt.Sprintf(format, a...))) }
	names := make(map[string]string)
	before := make(map[string]*meshv1.Member)
	for _, m := range from.members {
		before[m.GetKey()] = m
		names[m.GetKey()] = m.GetName()
	}
	for _, m := range to.members {
		names[m.GetKey()] = m.GetName()
		old, ok := before[m.GetKey()]
		delete(before, m.GetKey())
		if !ok {
			say("adds %s as %s%s, key %s, words %s", m.GetName(), rolesText(m.GetRoles()), powersClause(", which may sign ", powersOf(m)), m.GetKey(), wordsOf(m.GetKey()))
			continue
		}
		if old.GetName() != m.GetName() {
			say("renames %s to %s", old.GetName(), m.GetName())
		}
		if !slices.Equal(old.GetRoles(), m.GetRoles()) {
			say("makes %s %s, it was %s", m.GetName(), rolesText(m.GetRoles()), rolesText(old.GetRoles()))
		}
		had, has := powersOf(old), powersOf(m)
		if gained := without(has, had); len(gained) > 0 {
			say("lets %s sign %s", m.GetName(), strings.Join(gained, ", "))
		}
		if lost := without(had, has); len(lost) > 0 {
			say("no longer lets %s sign %s", m.GetName(), strings.Join(lost, ", "))
		}
	}
	for _, m := range from.members {
		if before[m.GetKey()] != nil {
			say("removes %s (%s), key %s", m.GetName(), rolesText(m.GetRoles()), m.GetKey())
		}
	}
	called := func(key string) string {
		if n := names[key]; n != "" {
			return n
		}
		return key
	}
	places := make(map[string]*meshv1.BootstrapAddress)
	for _, b := range from.bootstraps {
		places[b.GetKey()] = b
	}
	for _, b := range to.bootstraps {
		old, ok := places[b.GetKey()]
		delete(places, b.GetKey())
		switch {
		case !ok:
			say("tells everyone to find the network at %s: %s", called(b.GetKey()), strings.Join(b.GetAddresses(), " "))
		case !slices.Equal(old.GetAddresses(), b.GetAddresses()):
			say("moves %s to %s, it was at %s", called(b.GetKey()), strings.Join(b.GetAddresses(), " "), strings.Join(old.GetAddresses(), " "))
		}
	}
	for _, b := range from.bootstraps {
		if places[b.GetKey()] != nil {
			say("no longer tells anyone to find the network at %s", called(b.GetKey()))
		}
	}
	if !slices.Equal(from.roots, to.roots) {
		if lost := without(from.roots, to.roots); len(lost) > 0 {
			say("takes all power from root key %s", strings.Join(lost, ", "))
		}
		if gained := without(to.roots, from.roots); len(gained) > 0 {
			say("makes %s root key", strings.Join(gained, ", "))
		}
	}
	return lines
}

// describe says what a request asks for, with a roster that is good until then.
func describe(r *meshv1.ChangeRequest, base *trust.Network, until, now time.Time) []string {
	lines := differences(contentOf(base), asked(r, base))
	if r.GetRotateRootKeys() {
		lines = append(lines, "makes new root keys where it is signed, and takes all power from root key "+strings.Join(base.RootKeys(), ", "))
	}
	if r.GetSignRoster() || r.GetRotateRootKeys() {
		lines = append(lines, fmt.Sprintf("roster version %d becomes %d, %s; it was %s", base.Roster().GetVersion(), base.Roster().GetVersion()+1,
			goodUntil(until, now), goodUntil(base.RosterNotAfter(), now)))
	}
	if r.GetSignNetworkInfo() || r.GetRotateRootKeys() {
		lines = append(lines, fmt.Sprintf("network info %d becomes %d", base.Info().GetSequence(), base.Info().GetSequence()+1))
	}
	return lines
}

func goodUntil(t, now time.Time) string {
	const day = 24 * time.Hour
	days := int(t.Sub(now).Round(day) / day)
	switch {
	case !now.Before(t):
		return "over since " + t.Local().Format(time.DateTime)
	case days < 1:
		return "good until " + t.Local().Format(time.DateTime)
	}
	return fmt.Sprintf("good until %s (%d days)", t.Local().Format(time.DateOnly), days)
}

func rolesText(roles []meshv1.Role) string {
	texts := make([]string, len(roles))
	for i, r := range roles {
		texts[i] = roleText(r)
	}
	return strings.Join(texts, ",")
}

type power struct {
	name string
	of   func(*meshv1.Member) *bool
}

// The powers that a root key delegates, as people write them.
var powers = []power{
	{"certificates", func(m *meshv1.Member) *bool { return &m.SignsCertificates }},
	{"grants", func(m *meshv1.Member) *bool { return &m.SignsGrants }},
	{"rosters", func(m *meshv1.Member) *bool { return &m.SignsRosters }},
}

func powersOf(m *meshv1.Member) []string {
	var has []string
	for _, p := range powers {
		if *p.of(m) {
			has = append(has, p.name)
		}
	}
	return has
}

func powersClause(lead string, has []string) string {
	if len(has) == 0 {
		return ""
	}
	return lead + strings.Join(has, ", ")
}

func without(list, taken []string) []string {
	return slices.DeleteFunc(slices.Clone(list), func(s string) bool { return slices.Contains(taken, s) })
}

func wordsOf(key string) string {
	p, err := identity.ParseID(key)
	if err != nil {
		return "-"
	}
	return keyWords(p)
}
