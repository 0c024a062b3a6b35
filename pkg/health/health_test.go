package health

import (
	"regexp"
	"strings"
	"testing"
	"time"
)

func TestEveryWarningSaysWhatToDo(t *testing.T) {
	t.Parallel()
	code := regexp.MustCompile(`^[a-z]+(_[a-z]+)*$`)
	seen := map[Code]bool{}
	for _, w := range Declared() {
		if !code.MatchString(string(w.Code)) || seen[w.Code] {
			t.Errorf("code %q", w.Code)
		}
		seen[w.Code] = true
		if rank(string(w.Severity)) < 0 || len(w.Text) < 10 || w.Remedy == "" {
			t.Errorf("%s: %+v", w.Code, w)
		}
		if strings.Count(w.Text, "%")+strings.Count(w.Remedy, "%") != strings.Count(w.Text+w.Remedy, "%s") {
			t.Errorf("%s: only %%s stands for an argument", w.Code)
		}
	}
}

func TestAWarningKeepsItsFirstTimeAndGoesWhenCleared(t *testing.T) {
	t.Parallel()
	now := time.Unix(1000, 0)
	s := NewSet(func() time.Time { return now })
	changes, cancel := s.Subscribe()
	defer cancel()
	s.Raise(StoreDiskLow, "/var", "2 GiB")
	now = now.Add(time.Hour)
	s.Raise(StoreDiskLow, "/var", "1 GiB")
	list := s.List()
	if len(list) != 1 || !strings.Contains(list[0].GetText(), "1 GiB") || list[0].GetSince().GetSeconds() != 1000 {
		t.Errorf("%v", list)
	}
	<-changes
	s.Raise(StoreDiskLow, "/var", "1 GiB")
	if len(changes) != 0 {
		t.Error("the same words gave a signal")
	}
	s.Clear(StoreDiskLow)
	s.Clear(StoreDiskLow)
	<-changes
	if len(s.List()) != 0 || len(changes) != 0 || s.Has(StoreDiskLow) {
		t.Error("still there")
	}
}

func TestSubjectsHaveWarningsOfTheirOwnAndTheWorstComesFirst(t *testing.T) {
	t.Parallel()
	s := NewSet(nil)
	s.Raise(Simulated, "cluster")
	s.RaiseFor(ClockSkew, "a", "rack-1", "3m")
	s.RaiseFor(ClockSkew, "b", "rack-2", "4m")
	s.RaiseFor(RackNotRegistered, "rk-1", "rk-1", "12D3")
	list := s.List()
	if len(list) != 4 || list[0].GetCode() != string(RackNotRegistered) || !strings.Contains(list[0].GetRemedy(), "12D3") || list[3].GetCode() != string(Simulated) {
		t.Errorf("%v", list)
	}
	s.ClearFor(ClockSkew, "a")
	if !s.Has(ClockSkew) || len(s.List()) != 3 {
		t.Error("cleared the wrong one")
	}
}

func TestWrongUseShowsInsteadOfHiding(t *testing.T) {
	t.Parallel()
	s := NewSet(nil)
	s.Raise("made_up", 1)
	s.Raise(OrkUnreachable)
	s.Raise(StorageFailing, "write\nx\x00", strings.Repeat("é", 5000), "extra")
	for _, w := range s.List() {
		if strings.Contains(w.GetText(), "%!") || strings.ContainsAny(w.GetText(), "\n\x00") || len(w.GetText()) > 2000 {
			t.Errorf("%q", w.GetText())
		}
	}
	if !s.Has(Undeclared) || s.List()[2].GetText() == "" {
		t.Errorf("%v", s.List())
	}
}
