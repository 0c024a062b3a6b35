package notice

import (
	"slices"
	"testing"
)

func TestWhoWatchesOneJobHearsOfNoOther(t *testing.T) {
	t.Parallel()
	var hub Hub
	all, one, again := hub.Subscribe(), hub.SubscribeTo("j-1"), hub.SubscribeTo("j-1")
	defer all.Close()
	hub.Publish("j-2", "j-3")
	select {
	case <-one.Ready():
		t.Fatal("woken for another job")
	default:
	}
	hub.Publish("j-1", "j-2")
	for _, s := range []*Subscription{one, again} {
		<-s.Ready()
		if got := s.Take(); !slices.Equal(got, []string{"j-1"}) {
			t.Errorf("took %v", got)
		}
	}
	<-all.Ready()
	if got := all.Take(); !slices.Equal(got, []string{"j-1", "j-2", "j-3"}) {
		t.Errorf("took %v", got)
	}

	// A closed one is forgotten, the other one of the same job goes on.
	one.Close()
	one.Close()
	hub.Publish("j-1")
	if got := one.Take(); len(got) != 0 {
		t.Errorf("took %v after the end", got)
	}
	<-again.Ready()
	again.Close()
	if len(hub.only) != 0 {
		t.Errorf("%d jobs are remembered without a subscription", len(hub.only))
	}
}
