package e2e

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestPlayedVMs plays VMs that have no process: they take GPUs, run, survive a kill of the cluster and free what they held.
func TestPlayedVMs(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "state")
	args := []string{"--play-vms", "--pool", "name=us,nodes=1,gpus=8,resource=nvidia.com/GH100_H100_SXM5_80GB", "--import-time", "100ms", "--boot-time", "100ms"}
	c := start(t, dir, args...)
	if !strings.Contains(c.log.String(), "only played") {
		t.Error("the log does not say that vms are only played")
	}
	k := c.admin()
	k.create(vmis, gpuVMI("first", 8, "", ""))
	first := k.untilPhase(vmis+"/first", "Running")
	if first.str("status.nodeName") != "us-gpu-00" || first.condition("Ready").str("status") != "True" {
		t.Errorf("a played vm says %v", first.at("status"))
	}
	folder := filepath.Join(dir, "vms", first.str("metadata.uid"))
	if _, err := os.Stat(folder); err != nil {
		t.Errorf("a played vm has no record: %v", err)
	}
	for _, of := range []string{"process.json", "root"} {
		if _, err := os.Stat(filepath.Join(folder, of)); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("a played vm has %s: %v", of, err)
		}
	}

	// Its GPUs are taken: another one waits for them, in the real scheduler's words.
	k.create(vmis, gpuVMI("second", 1, "", ""))
	eventually(t, func() string {
		if m := k.get(vmis + "/second").condition("PodScheduled").str("message"); !strings.Contains(m, "Insufficient nvidia.com/GH100_H100_SXM5_80GB") {
			return "the second vm waits for: " + m
		}
		return ""
	})

	// Faults of the API need a proxy, which this cluster does not have.
	out, err := exec.Command(binary, "fault", "set", "--dir", dir, "api-slow", "delay=1s").CombinedOutput()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 2 || !strings.Contains(string(out), "--api-proxy") {
		t.Errorf("an api fault without the proxy: %v %s", err, out)
	}

	// A kill of the cluster takes none down.
	c.kill9()
	c = start(t, dir, args...)
	k = c.admin()
	if again := k.untilPhase(vmis+"/first", "Running"); again.str("metadata.uid") != first.str("metadata.uid") {
		t.Error("it is another vm after the restart")
	}

	// Deleted, it goes with its pod and its record, and the one that waited runs.
	k.delete(vmis + "/first")
	k.untilGone(vmis + "/first")
	k.untilPhase(vmis+"/second", "Running")
	if pods := k.items(ns + "pods?labelSelector=kubevirt.io%2Fcreated-by%3D" + first.str("metadata.uid")); len(pods) != 0 {
		t.Errorf("%d pods of a vm that is gone", len(pods))
	}
	if _, err := os.Stat(folder); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the record of a vm that is gone: %v", err)
	}
}
