package placement

// Offer is what a rack could give now.
type Offer struct {
	RackID string
	// Available is the GPUs that nodes which take work offer.
	Available uint32
	// Largest is the most that one VM could get, with its CPU and memory.
	Largest uint32
}

// Offers lists, for each rack of the location that has the model, what it could
// give now to requests like this one, whatever their count.
func (p *Pass) Offers(q Request) []Offer {
	var out []Offer
	a := p.ask(q)
	for _, r := range a.racks {
		s := r.shelves[a.model]
		if s == nil || s.barred || s.largest == 0 {
			continue
		}
		o := Offer{RackID: r.ID}
		if r.live() {
			room := r.room()
			for _, e := range s.open {
				o.Available += e.level
			}
			o.Available = min(o.Available, room)
			for count := min(s.largest, room); count > o.Largest; count-- {
				one := *a
				one.Count = count
				if _, fits := one.fill(r, 1); fits {
					o.Largest = count
				}
			}
		}
		out = append(out, o)
	}
	return out
}
