package route

// Candidate is a replica that could take a request, as Pick sees it.
type Candidate struct {
	// ID is the same for a replica in every proxy.
	ID string
	// InFlight counts this proxy's requests on it.
	InFlight int
}

// spread is how far above the mean a home may be loaded before affinity yields.
const spread = 1.25

// Pick chooses one of the candidates, of which there must be at least one, and
// returns its index. It is pure: random gives a number in [0, n) on demand.
//
// With affinity zero it is the less loaded of two random ones. Otherwise the
// candidates are ordered by a hash of affinity and id, the same in every proxy.
// The first two are the homes of that affinity: the less loaded takes it. When
// both are loaded beyond 1.25 times the mean (plus one), the next in order that
// is not takes it. A replica that comes or goes moves only its own share.
func Pick(candidates []Candidate, affinity uint64, random func(n int) int) int {
	n := len(candidates)
	if n == 1 {
		return 0
	}
	if affinity == 0 {
		a := random(n)
		b := random(n - 1)
		if b >= a {
			b++
		}
		if candidates[b].InFlight < candidates[a].InFlight {
			return b
		}
		return a
	}
	total := 0
	scores := make([]uint64, n)
	for i, c := range candidates {
		total += c.InFlight
		scores[i] = mix(affinity ^ hash(c.ID))
	}
	bound := spread*float64(total)/float64(n) + 1
	first := highest(scores)
	scores[first] = 0
	second := highest(scores)
	scores[second] = 0
	home := first
	if candidates[second].InFlight < candidates[first].InFlight {
		home = second
	}
	// Ends at the latest with the least loaded one, which is at the mean or below.
	for range n - 2 {
		if float64(candidates[home].InFlight) <= bound {
			break
		}
		home = highest(scores)
		scores[home] = 0
	}
	return home
}

func highest(scores []uint64) int {
	best := 0
	for i, s := range scores {
		if s > scores[best] {
			best = i
		}
	}
	return best
}

// Affinity is the hash by which requests with the same beginning go to the same
// replicas. Tenants do not share it, so that one cannot probe another's cache
// by timing. It is never zero.
func Affinity(projectID, model string, beginning []byte) uint64 {
	h := uint64(fnvOffset)
	for _, s := range []string{projectID, model} {
		for i := range len(s) {
			h = (h ^ uint64(s[i])) * fnvPrime
		}
		h = (h ^ 0xff) * fnvPrime
	}
	for _, b := range beginning {
		h = (h ^ uint64(b)) * fnvPrime
	}
	return mix(h) | 1
}

const (
	fnvOffset = 14695981039346656037
	fnvPrime  = 1099511628211
)

// hash is FNV-1a, which is the same in every process and version.
func hash(s string) uint64 {
	h := uint64(fnvOffset)
	for i := range len(s) {
		h = (h ^ uint64(s[i])) * fnvPrime
	}
	return h
}

// mix spreads the bits of h; the last step of splitmix64. Never zero, since
// zero marks a score as used.
func mix(h uint64) uint64 {
	h ^= h >> 30
	h *= 0xbf58476d1ce4e5b9
	h ^= h >> 27
	h *= 0x94d049bb133111eb
	h ^= h >> 31
	if h == 0 {
		return 1
	}
	return h
}
