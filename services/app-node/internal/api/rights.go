package api

import (
	"slices"

	"github.com/cosmicac/cosmicac/services/app-node/internal/account"
)

// Right is what an operation needs of its caller. Every operation of the table in
// routes.go names one; one without is refused to all.
type Right string

// The rights.
const (
	// Public needs nothing.
	Public Right = "public"
	// Authenticated needs a live token.
	Authenticated Right = "authenticated"
	// JobsRead and JobsWrite are about jobs of the caller's projects.
	JobsRead  Right = "jobs:read"
	JobsWrite Right = "jobs:write"
	// VolumesRead and VolumesWrite are about volumes of the caller's projects.
	VolumesRead  Right = "volumes:read"
	VolumesWrite Right = "volumes:write"
	// KeysRead and KeysWrite are about the caller's own API keys.
	KeysRead  Right = "keys:read"
	KeysWrite Right = "keys:write"
	// Admin is about the installation and other people.
	Admin Right = "admin"
)

// Extension is the name under which the document states an operation's right.
const Extension = "x-cosmicac-right"

// memberRights is what everybody with a live token may do; an administrator may all.
var memberRights = []Right{Authenticated, JobsRead, JobsWrite, VolumesRead, VolumesWrite, KeysRead, KeysWrite}

// known lists every right, so that a misspelt one is refused and not granted.
var known = append([]Right{Public, Admin}, memberRights...)

func allows(p account.Person, r Right) bool {
	if !slices.Contains(known, r) {
		return false
	}
	return p.User.Administrator || slices.Contains(memberRights, r)
}

// rightsOf lists what a person may do, for an interface that offers nothing else.
func rightsOf(p account.Person) (rights []Right) {
	for _, r := range known {
		if r != Public && allows(p, r) {
			rights = append(rights, r)
		}
	}
	return rights
}
