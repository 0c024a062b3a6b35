// Package spec checks what a user asks for. Check returns every problem of a
// job specification at once, each with the field's name as the HTTP API and
// the CLI call it, and the specification as it is recorded: defaults filled in,
// names in Unicode's composed form (NFC).
//
// It knows nothing of racks, models on offer or quotas: a well-formed request
// that nothing can satisfy is not malformed.
package spec

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"golang.org/x/crypto/ssh"
	"golang.org/x/text/unicode/norm"
	"google.golang.org/protobuf/proto"

	"github.com/cosmicac/cosmicac/pkg/fault"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
)

// Bounds and defaults of a specification.
const (
	NameCharacters  = 63
	Tags            = 16
	GPUs            = 4096
	DiskGiB         = 65536
	CPUCoresPerGPU  = 256
	MemoryGiBPerGPU = 4096
	Replicas        = 64
	ScriptBytes     = 64 << 10

	// Priority is between -Priority and Priority.
	Priority = 100

	DefaultCPUCoresPerGPU  = 8
	DefaultMemoryGiBPerGPU = 32
	// DefaultDiskGiB is a root disk that nobody sized.
	DefaultDiskGiB = 100

	environmentEntries = 256
	environmentBytes   = 128 << 10
	arguments          = 128
	sshKeys            = 64
)

// The runtimes of Managed Inference.
const (
	RuntimeVLLM     = "vllm"
	RuntimeParakeet = "parakeet"
	RuntimeEmbedded = "embedded"
	RuntimeCommand  = "command"
)

var (
	locationForm = regexp.MustCompile(`^[a-z0-9-]{1,32}$`)
	modelForm    = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$`)
	variableForm = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]{0,127}$`)
	userForm     = regexp.MustCompile(`^[a-z_][a-z0-9_-]{0,31}$`)
	// A model's id is a Hugging Face id or a name of the catalogue.
	modelIDForm = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._/:@+-]{0,255}$`)
)

type problems struct{ list []fault.Detail }

func (p *problems) add(field, rule string, a ...any) {
	if len(p.list) < 100 {
		p.list = append(p.list, fault.Detail{Field: field, Rule: fmt.Sprintf(rule, a...)})
	}
}

// Check returns the specification to record, or an error of kind invalid whose
// details are all the problems. The argument is not changed.
func Check(in *orkv1.JobSpec) (*orkv1.JobSpec, error) {
	p := &problems{}
	if in == nil {
		p.add("spec", "is missing")
		return nil, p.err()
	}
	s := proto.Clone(in).(*orkv1.JobSpec)
	s.Name = p.label("name", s.Name)
	p.tags(s)
	if !locationForm.MatchString(s.Location) {
		p.add("location", "is a code of 1 to 32 of a-z, 0-9 and -, in lower case, like us")
	}
	switch s.Kind {
	case orkv1.JobKind_JOB_KIND_GPU_CONTAINER:
		p.container(s)
	case orkv1.JobKind_JOB_KIND_MANAGED_INFERENCE:
		p.inference(s)
	default:
		p.add("kind", "is gpu_container or managed_inference")
	}
	p.hardware(s)
	p.queueing(s)
	p.limits(s)
	p.ports(s)
	p.volumes(s)
	p.image(s)
	p.environment(s)
	p.login(s)
	if d := s.MaxDuration; d != nil {
		if err := d.CheckValid(); err != nil || d.AsDuration() < 0 || d.AsDuration() > 10*365*24*time.Hour {
			p.add("max_duration_seconds", "is 0 (none) to ten years")
		}
	}
	if len(p.list) > 0 {
		return nil, p.err()
	}
	return s, nil
}

func (p *problems) err() error {
	return fault.InvalidFields("the job cannot be created", p.list)
}

// label checks text that people read and brings it to NFC.
func (p *problems) label(field, text string) string {
	if !utf8.ValidString(text) {
		p.add(field, "is not valid UTF-8")
		return text
	}
	text = norm.NFC.String(text)
	if n := utf8.RuneCountInString(text); n < 1 || n > NameCharacters {
		p.add(field, "has %d characters; 1 to %d are allowed", n, NameCharacters)
		return text
	}
	for _, r := range text {
		if !printable(r) {
			p.add(field, "holds the character U+%04X; control and formatting characters and line breaks are not allowed", r)
			return text
		}
	}
	if text != strings.TrimSpace(text) {
		p.add(field, "begins or ends with a blank")
	}
	return text
}

// printable allows letters of any script, marks, numbers, punctuation, symbols
// and the blank, and the two joiners that scripts and emoji need. What could
// move the cursor or the direction of text is not.
func printable(r rune) bool {
	const nonJoiner, joiner = '\u200c', '\u200d'
	return unicode.IsPrint(r) || r == joiner || r == nonJoiner
}

func (p *problems) tags(s *orkv1.JobSpec) {
	if len(s.Tags) > Tags {
		p.add("tags", "has %d; at most %d are allowed", len(s.Tags), Tags)
		return
	}
	var tags []string
	for i, t := range s.Tags {
		t = p.label(fmt.Sprintf("tags[%d]", i), t)
		if !slices.Contains(tags, t) {
			tags = append(tags, t)
		}
	}
	s.Tags = tags
}

func (p *problems) hardware(s *orkv1.JobSpec) {
	if s.Gpu == nil {
		s.Gpu = &orkv1.GpuRequest{}
	}
	g := s.Gpu
	withoutGPU := g.Count == 0 && s.GetInference().GetRuntime() == RuntimeEmbedded &&
		s.Kind == orkv1.JobKind_JOB_KIND_MANAGED_INFERENCE
	switch {
	case withoutGPU:
		if g.Model != "" && !modelForm.MatchString(g.Model) {
			p.add("gpu.model", "is a model code like GH100_H100_SXM5_80GB")
		}
	default:
		if !modelForm.MatchString(g.Model) {
			p.add("gpu.model", "is a model code like GH100_H100_SXM5_80GB: 1 to 100 letters, digits, '.', '_' and '-'")
		}
		if g.Count < 1 || g.Count > GPUs {
			rule := fmt.Sprintf("is %d; 1 to %d are allowed", g.Count, GPUs)
			if g.Count == 0 {
				rule += ", and 0 for the embedded runtime only"
			}
			p.add("gpu.count", "%s", rule)
		}
	}
	if s.CpuCoresPerGpu > CPUCoresPerGPU {
		p.add("cpu_cores_per_gpu", "is %d; 0 (for %d) to %d are allowed", s.CpuCoresPerGpu, DefaultCPUCoresPerGPU, CPUCoresPerGPU)
	} else if s.CpuCoresPerGpu == 0 {
		s.CpuCoresPerGpu = DefaultCPUCoresPerGPU
	}
	if s.MemoryGibPerGpu > MemoryGiBPerGPU {
		p.add("memory_gib_per_gpu", "is %d; 0 (for %d) to %d are allowed", s.MemoryGibPerGpu, DefaultMemoryGiBPerGPU, MemoryGiBPerGPU)
	} else if s.MemoryGibPerGpu == 0 {
		s.MemoryGibPerGpu = DefaultMemoryGiBPerGPU
	}
	if s.DiskGib == 0 {
		s.DiskGib = DefaultDiskGiB
	}
	if s.DiskGib > DiskGiB {
		p.add("disk_gib", "is %d; 0 (for %d) to %d are allowed", s.DiskGib, DefaultDiskGiB, DiskGiB)
	}
}

func (p *problems) queueing(s *orkv1.JobSpec) {
	switch s.Placement {
	case orkv1.Placement_PLACEMENT_UNSPECIFIED:
		s.Placement = orkv1.Placement_PLACEMENT_PACK
	case orkv1.Placement_PLACEMENT_PACK, orkv1.Placement_PLACEMENT_SPREAD:
	default:
		p.add("placement", "is pack or spread")
	}
	if s.Priority < -Priority || s.Priority > Priority {
		p.add("priority", "is %d; -%d to %d are allowed", s.Priority, Priority, Priority)
	}
}

func (p *problems) container(s *orkv1.JobSpec) {
	if s.GetImage().GetReference() == "" {
		p.add("image", "is needed for a GPU container")
	}
	if s.Inference != nil && !proto.Equal(s.Inference, &orkv1.InferenceSpec{}) {
		p.add("model", "and the other serving fields are for managed inference only")
	}
	s.Inference = nil
}

func (p *problems) inference(s *orkv1.JobSpec) {
	if s.Inference == nil {
		s.Inference = &orkv1.InferenceSpec{}
	}
	inf := s.Inference
	if inf.Model == "" {
		p.add("model", "is needed for managed inference")
	} else if !modelIDForm.MatchString(inf.Model) {
		p.add("model", "is a model id like Qwen/Qwen3-32B, of at most 256 characters without blanks")
	}
	switch inf.Runtime {
	case RuntimeVLLM, RuntimeParakeet, RuntimeEmbedded, RuntimeCommand:
	default:
		p.add("runtime", "is vllm, parakeet, embedded or command")
	}
	if inf.Replicas == 0 {
		inf.Replicas = 1
	}
	if inf.Replicas > Replicas {
		p.add("replicas", "is %d; 1 to %d are allowed", inf.Replicas, Replicas)
	}
	if len(inf.Arguments) > arguments {
		p.add("engine_arguments", "has %d; at most %d are allowed", len(inf.Arguments), arguments)
	} else {
		for i, a := range inf.Arguments {
			if len(a) > 4096 || strings.ContainsAny(a, "\x00\n\r") {
				p.add(fmt.Sprintf("engine_arguments[%d]", i), "is longer than 4096 bytes, or holds a line break or a zero byte")
			}
		}
	}
	if inf.Runtime == RuntimeCommand && len(inf.Arguments) == 0 {
		p.add("engine_arguments", "names the command to run; the command runtime needs it")
	}
	if len(inf.ServedNames) > 16 {
		p.add("served_names", "has %d; at most 16 are allowed", len(inf.ServedNames))
	} else {
		for i, n := range inf.ServedNames {
			if !modelIDForm.MatchString(n) {
				p.add(fmt.Sprintf("served_names[%d]", i), "is a name like Qwen/Qwen3-32B, of at most 256 characters without blanks")
			}
		}
	}
	if inf.MaximumContextTokens > 1<<24 {
		p.add("maximum_context_tokens", "is %d; 0 (the model's own) to %d are allowed", inf.MaximumContextTokens, 1<<24)
	}
}

func (p *problems) image(s *orkv1.JobSpec) {
	i := s.Image
	if i == nil {
		return
	}
	if len(i.Reference) > 512 || !graphic(i.Reference) {
		p.add("image", "has a reference that is longer than 512 characters or holds blanks")
	}
	if i.Name != "" && (len(i.Name) > 128 || !graphic(strings.ReplaceAll(i.Name, " ", ""))) {
		p.add("image", "has a name that is longer than 128 characters or not plain text")
	}
	if i.DefaultUser != "" && !userForm.MatchString(i.DefaultUser) {
		p.add("image", "has a default user that is not a Linux user name")
	}
}

// graphic allows visible ASCII only.
func graphic(text string) bool {
	for i := range len(text) {
		if text[i] <= ' ' || text[i] > '~' {
			return false
		}
	}
	return true
}

func (p *problems) environment(s *orkv1.JobSpec) {
	if len(s.Environment) > environmentEntries {
		p.add("environment", "has %d variables; at most %d are allowed", len(s.Environment), environmentEntries)
		return
	}
	total := 0
	keys := make([]string, 0, len(s.Environment))
	for k := range s.Environment {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	for _, k := range keys {
		v := s.Environment[k]
		total += len(k) + len(v)
		if !variableForm.MatchString(k) {
			p.add("environment", "has the name %.64q; a name is a letter or _, then letters, digits or _", k)
		}
		// Values may be secrets: never in the message.
		if strings.ContainsRune(v, 0) {
			p.add("environment", "has a value with a NUL byte at %s", k)
		}
	}
	if total > environmentBytes {
		p.add("environment", "has %d bytes; at most %d are allowed", total, environmentBytes)
	}
}

func (p *problems) login(s *orkv1.JobSpec) {
	if len(s.StartScript) > ScriptBytes {
		p.add("start_script", "has %d bytes; at most %d are allowed", len(s.StartScript), ScriptBytes)
	}
	if strings.ContainsRune(s.StartScript, 0) {
		p.add("start_script", "holds a NUL byte")
	}
	if len(s.SshAuthorizedKeys) > sshKeys {
		p.add("ssh_authorized_keys", "has %d; at most %d are allowed", len(s.SshAuthorizedKeys), sshKeys)
		return
	}
	for i, k := range s.SshAuthorizedKeys {
		field := fmt.Sprintf("ssh_authorized_keys[%d]", i)
		if len(k) > 8<<10 || strings.ContainsAny(strings.TrimRight(k, "\n"), "\n\r\x00") {
			p.add(field, "is one line of at most 8192 bytes")
			continue
		}
		if _, _, _, _, err := ssh.ParseAuthorizedKey([]byte(k)); err != nil {
			p.add(field, "is not an OpenSSH public key like \"ssh-ed25519 AAAA... name\"")
			continue
		}
		s.SshAuthorizedKeys[i] = strings.TrimSpace(k)
	}
}

// Owner checks who a job is for, as app-node says.
func Owner(o *orkv1.Owner) error {
	p := &problems{}
	for _, f := range []struct {
		field, value string
		needed       bool
	}{{"project_id", o.GetProjectId(), true}, {"user_id", o.GetUserId(), false}} {
		if (f.needed && f.value == "") || len(f.value) > 128 || !graphic(f.value) {
			p.add(f.field, "is 1 to 128 visible ASCII characters")
		}
	}
	if len(p.list) > 0 {
		return p.err()
	}
	return nil
}

// IdempotencyKey checks a key; empty is none.
func IdempotencyKey(key string) error {
	if len(key) > 128 || !graphic(strings.ReplaceAll(key, " ", "")) {
		p := &problems{}
		p.add("idempotency_key", "is 1 to 128 printable ASCII characters")
		return p.err()
	}
	return nil
}
