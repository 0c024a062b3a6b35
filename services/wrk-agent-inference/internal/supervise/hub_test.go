package supervise_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cosmicac/cosmicac/services/wrk-agent-inference/internal/supervise"
)

// answering has the hub give these answers, one for each start of the engine.
func answering(t *testing.T, answers ...string) (*supervise.Supervisor, string) {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "hub"), []byte(strings.Join(answers, "\n")), 0o600); err != nil {
		t.Fatal(err)
	}
	s, _ := start(t, dir, nil)
	return s, dir
}

// TestAModelThatCannotBeHadIsGivenUpAtOnceInTheHubsWords is try P23: a misspelt id and
// a gated model without a token are final.
func TestAModelThatCannotBeHadIsGivenUpAtOnceInTheHubsWords(t *testing.T) {
	t.Parallel()
	for _, word := range []string{
		"RepositoryNotFoundError: 404 Client Error. Repository Not Found for url: https://hub/Qwen/Qwne3",
		"OSError: Qwen/Qwne3 is not a local folder and is not a valid model identifier listed on 'https://hub/models'",
		"GatedRepoError: 403 Client Error. Access to model meta/llama is restricted",
		"401 Client Error: Unauthorized for url: https://hub/meta/llama",
	} {
		s, dir := answering(t, word, word, word, word, word)
		eventually(t, s, "failed", is(s, supervise.Failed))
		if st := s.Status(); !st.Final || !strings.Contains(st.Message, word) || !strings.Contains(st.Message, "cannot be had") || st.ExitCode != 1 {
			t.Errorf("%+v", st)
		}
		if n := len(read(dir, "starts")); n != 1 {
			t.Errorf("%s: it was started %d times", word, n)
		}
	}
}

// TestAHubThatIsBusyTwiceIsAskedAgain is the other half of try P23.
func TestAHubThatIsBusyTwiceIsAskedAgain(t *testing.T) {
	t.Parallel()
	busy := "HfHubHTTPError: 503 Server Error: Service Unavailable for url: https://hub/Qwen/Qwen3"
	s, dir := answering(t, busy, busy)
	eventually(t, s, "ready", is(s, supervise.Ready))
	if n := len(read(dir, "starts")); n != 3 {
		t.Errorf("it was started %d times", n)
	}
	// One that is busy for ever is given up, too, and may be tried on another machine.
	s, _ = answering(t, busy, busy, busy, busy, busy, busy)
	eventually(t, s, "failed", is(s, supervise.Failed))
	if st := s.Status(); st.Final || !strings.Contains(st.Message, "5 times") {
		t.Errorf("%+v", st)
	}
}
