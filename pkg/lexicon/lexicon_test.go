package lexicon

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
)

var update = flag.Bool("update", false, "write what is made from the words anew")

func TestEveryStateReasonAndConditionHasItsWords(t *testing.T) {
	t.Parallel()
	for kind, all := range map[string][]Entry{"state": States(), "reason": Reasons(), "condition": Conditions(), "volume state": VolumeStates()} {
		seen := map[string]bool{}
		for _, e := range all {
			if e.Label == "" || e.Means == "" || e.Remedy == "" || seen[e.Name] || strings.ContainsAny(e.Label+e.Means+e.Remedy, "|\n") ||
				strings.HasSuffix(e.Means, ".") || len(strings.Fields(e.Label)) > 5 {
				t.Errorf("%s %s: %+v", kind, e.Name, e)
			}
			seen[e.Name] = true
		}
	}
	if len(Reasons()) != len(orkv1.Reason_name)-1 || Name(orkv1.Reason_REASON_NEVER_FITS) != "never_fits" ||
		Name(orkv1.ConditionKind_CONDITION_KIND_CLEANUP_PENDING) != "cleanup_pending" || Name(orkv1.State(0)) != "" || Name(orkv1.State(999)) != "unknown" {
		t.Error("names are wrong")
	}
}

// table is a Markdown table of words between its marks.
func table(mark string, all []Entry, head string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "<!-- %s: made from proto/cosmicac/ork/v1 -->\n| %s |\n|---|---|---|\n", mark, head)
	for _, e := range all {
		fmt.Fprintf(&b, "| `%s` | %s | %s |\n", e.Name, e.Means, e.Remedy)
	}
	fmt.Fprintf(&b, "<!-- end of %s -->", mark)
	return b.String()
}

func labels(b *strings.Builder, name string, all []Entry) {
	fmt.Fprintf(b, "\nexport const %s: Record<string, Words> = {\n", name)
	for _, e := range all {
		fmt.Fprintf(b, "  %s: { label: %q, means: %q, remedy: %q },\n", e.Name, e.Label, e.Means, e.Remedy)
	}
	b.WriteString("};\n")
}

func TestWhatIsMadeFromTheWordsIsFresh(t *testing.T) {
	t.Parallel()
	const readme, script = "../../services/wrk-ork/README.md", "../../services/app-ui/src/words.ts"
	text, err := os.ReadFile(readme)
	if err != nil {
		t.Fatal(err)
	}
	fresh := string(text)
	for mark, made := range map[string]string{
		"states":     table("states", States(), "state | what it means | what moves it on"),
		"reasons":    table("reasons", Reasons(), "reason | what it means | what would have to change"),
		"conditions": table("conditions", Conditions(), "condition | what it means | what to do"),
		"volumes":    table("volumes", VolumeStates(), "state | what it means | what moves it on"),
	} {
		between := regexp.MustCompile(`(?s)<!-- ` + mark + `: .*<!-- end of ` + mark + ` -->`)
		if !between.MatchString(fresh) {
			t.Errorf("%s has no marks for the %s", readme, mark)
		}
		fresh = between.ReplaceAllLiteralString(fresh, made)
	}
	var b strings.Builder
	b.WriteString("// Made from proto/cosmicac/ork/v1 by `make generate`; not edited by hand.\n\n" +
		"/** What people read of a state, a reason or a condition. */\nexport interface Words { label: string; means: string; remedy: string }\n")
	labels(&b, "states", States())
	labels(&b, "reasons", Reasons())
	labels(&b, "conditions", Conditions())
	labels(&b, "volumeStates", VolumeStates())
	for file, made := range map[string][]byte{readme: []byte(fresh), script: []byte(b.String())} {
		have, err := os.ReadFile(file)
		if err != nil && !os.IsNotExist(err) {
			t.Fatal(err)
		}
		if bytes.Equal(have, made) {
			continue
		}
		if !*update {
			t.Errorf("%s is stale: run make generate", file)
			continue
		}
		if err := os.WriteFile(file, made, 0o644); err != nil {
			t.Fatal(err)
		}
	}
}
