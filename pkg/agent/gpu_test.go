package agent

import (
	"os"
	"path/filepath"
	"testing"

	agentv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/agent/v1"
)

func TestGPUUseIsToldOrSaidToBeUnknown(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("PATH", dir)
	seed := &agentv1.Seed{GpuCount: 2}
	say := func(text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, "nvidia-smi"), []byte("#!/bin/sh\n"+text), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	check := func(name string, working, known bool) {
		t.Helper()
		if w, k := SampleGPUUse(t.Context(), seed); w != working || k != known {
			t.Errorf("%s: working=%v known=%v", name, w, k)
		}
	}
	check("no nvidia-smi", false, false)
	say("echo 0; echo 0\n")
	check("both rest", false, true)
	say("echo 0; echo 7\n")
	check("one works", true, true)
	say("echo 0; echo '[N/A]'\n")
	check("one does not say", false, false)
	say("exit 9\n")
	check("it fails", false, false)
	say("echo 50\n")
	seed.Simulated = true
	check("simulated", false, false)
}
