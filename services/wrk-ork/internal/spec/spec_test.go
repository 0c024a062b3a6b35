package spec

import (
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/cosmicac/cosmicac/pkg/fault"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
)

func container() *orkv1.JobSpec {
	return &orkv1.JobSpec{
		Kind: orkv1.JobKind_JOB_KIND_GPU_CONTAINER, Name: "train", Location: "us", DiskGib: 20,
		Gpu:   &orkv1.GpuRequest{Model: "GH100_H100_SXM5_80GB", Count: 1},
		Image: &orkv1.Image{Name: "Ubuntu22.04/CUDA12.8.1", Reference: "docker://example/ubuntu:22.04", DefaultUser: "ubuntu"},
	}
}

func fields(err error) map[string]string {
	out := make(map[string]string)
	for _, d := range fault.DetailsOf(err) {
		out[d.Field] = d.Rule
	}
	return out
}

func TestNamesOfAnyScriptAreKeptOrRefusedAtOnce(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]string{
		"campaña": "campaña", "模型-1": "模型-1", "🚀": "🚀", "👩\u200d💻": "👩\u200d💻", "שלום": "שלום", "سلام": "سلام",
		"é": "é", "e\u0301": "é", "A B": "A B", "a/b": "a/b", "../x": "../x",
		"": "!", "a\nb": "!", " a": "!", "a ": "!", "\u202eevil": "!", "a\x00b": "!", "a\u2028b": "!", "\u00a0a": "!",
		"a\x1b[31m": "!", strings.Repeat("x", 64): "!", strings.Repeat("模", 63): strings.Repeat("模", 63),
	} {
		s := container()
		s.Name = name
		s.Tags = []string{name}
		got, err := Check(s)
		if want == "!" {
			f := fields(err)
			if fault.KindOf(err) != fault.Invalid || f["name"] == "" || f["tags[0]"] == "" {
				t.Errorf("%q: want it refused as name and tag with a rule, got %v %v", name, err, f)
			}
			continue
		}
		if err != nil {
			t.Errorf("%q: refused: %v", name, err)
		} else if got.Name != want || got.Tags[0] != want {
			t.Errorf("%q: kept as %q, want %q", name, got.Name, want)
		}
	}
}

func TestEveryProblemComesAtOnce(t *testing.T) {
	t.Parallel()
	s := &orkv1.JobSpec{
		Kind: orkv1.JobKind_JOB_KIND_GPU_CONTAINER, Location: "US", DiskGib: 70000,
		Gpu:            &orkv1.GpuRequest{Model: "a b", Count: 4294967295},
		CpuCoresPerGpu: 257, MemoryGibPerGpu: 4097,
		Environment: map[string]string{"1A": "x"}, StartScript: strings.Repeat("x", ScriptBytes+1),
		SshAuthorizedKeys: []string{"nonsense"},
	}
	_, err := Check(s)
	f := fields(err)
	for _, want := range []string{"name", "location", "disk_gib", "gpu.model", "gpu.count", "cpu_cores_per_gpu",
		"memory_gib_per_gpu", "environment", "start_script", "ssh_authorized_keys[0]", "image"} {
		if f[want] == "" {
			t.Errorf("no word about %s in %v", want, f)
		}
	}
	if !strings.Contains(f["gpu.count"], "4096") {
		t.Errorf("gpu.count does not name its bound: %s", f["gpu.count"])
	}
}

func TestZeroGPUsAreForTheEmbeddedRuntimeOnly(t *testing.T) {
	t.Parallel()
	for runtime, ok := range map[string]bool{"embedded": true, "vllm": false, "parakeet": false} {
		_, err := Check(&orkv1.JobSpec{
			Kind: orkv1.JobKind_JOB_KIND_MANAGED_INFERENCE, Name: "m", Location: "us",
			Inference: &orkv1.InferenceSpec{Model: "tiny", Runtime: runtime},
		})
		if (err == nil) != ok {
			t.Errorf("%s: %v", runtime, err)
		}
	}
	s := container()
	s.Gpu.Count = 0
	if _, err := Check(s); fields(err)["gpu.count"] == "" {
		t.Errorf("a container without GPU: %v", err)
	}
}

func TestDefaultsAreRecordedAndTheRequestIsNotChanged(t *testing.T) {
	t.Parallel()
	in := container()
	before := proto.Clone(in)
	got, err := Check(in)
	if err != nil {
		t.Fatal(err)
	}
	if got.CpuCoresPerGpu != 8 || got.MemoryGibPerGpu != 32 {
		t.Errorf("defaults: %d cores, %d GiB", got.CpuCoresPerGpu, got.MemoryGibPerGpu)
	}
	if !proto.Equal(in, before) {
		t.Error("the request was changed")
	}
}

func TestInferenceNeedsItsModelAndOneOfFourRuntimes(t *testing.T) {
	t.Parallel()
	_, err := Check(&orkv1.JobSpec{
		Kind: orkv1.JobKind_JOB_KIND_MANAGED_INFERENCE, Name: "m", Location: "us",
		Gpu:       &orkv1.GpuRequest{Model: "x", Count: 1},
		Inference: &orkv1.InferenceSpec{Runtime: "triton", Replicas: 65},
	})
	f := fields(err)
	if f["model"] == "" || f["runtime"] == "" || f["replicas"] == "" {
		t.Errorf("got %v", f)
	}
}
