package agent

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
	agentv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/agent/v1"
)

// SimulatedMark begins the UUID of a GPU that does not exist.
const SimulatedMark = "SIMULATED-"

// gpuListTime is generous: the driver may have to wake every card first.
const gpuListTime = 60 * time.Second

// ListGPUs says which GPUs this VM has, by nvidia-smi. Where a simulator plays the
// VM they are made up from the seed, and their UUIDs and model say so. No
// nvidia-smi is an empty list without error; one that fails is an error.
func ListGPUs(ctx context.Context, seed *agentv1.Seed) ([]*agentv1.Gpu, error) {
	if seed.GetSimulated() {
		var list []*agentv1.Gpu
		for i := range min(seed.GetGpuCount(), 64) {
			list = append(list, &agentv1.Gpu{
				Uuid:    fmt.Sprintf("%s%s-%d-%d", SimulatedMark, seed.GetAttemptId(), seed.GetNodeIndex(), i),
				Model:   seed.GetGpuModel() + " (simulated)",
				Healthy: true,
			})
		}
		return list, nil
	}
	path, err := exec.LookPath("nvidia-smi")
	if err != nil {
		return nil, nil
	}
	ctx, cancel := context.WithTimeout(ctx, gpuListTime)
	defer cancel()
	out, err := exec.CommandContext(ctx, path, "-L").Output()
	if err != nil {
		return nil, fault.Wrap(fault.Unavailable, err, "list GPUs with nvidia-smi -L: %v: %s", err, firstLine(out))
	}
	return parseGPUs(out), nil
}

var gpuLine = regexp.MustCompile(`^GPU \d+: (.+) \(UUID: (GPU-[0-9a-fA-F-]+)\)$`)

func parseGPUs(out []byte) []*agentv1.Gpu {
	var list []*agentv1.Gpu
	lines := bufio.NewScanner(bytes.NewReader(out))
	for lines.Scan() && len(list) < 64 {
		if m := gpuLine.FindStringSubmatch(lines.Text()); m != nil {
			list = append(list, &agentv1.Gpu{Uuid: m[2], Model: m[1], Healthy: true})
		}
	}
	return list
}

func firstLine(out []byte) string {
	line, _, _ := bytes.Cut(bytes.TrimSpace(out), []byte("\n"))
	return string(line[:min(len(line), 200)])
}

// CheckGPUs is nil when the VM has as many GPUs as the seed says.
func CheckGPUs(seed *agentv1.Seed, found []*agentv1.Gpu) error {
	if want := int(seed.GetGpuCount()); len(found) != want {
		hint := ""
		if len(found) == 0 {
			hint = "; is the NVIDIA driver part of the image?"
		}
		return fault.New(fault.FailedPrecondition, "%d GPUs are seen in this VM, the job has %d%s", len(found), want, hint)
	}
	return nil
}

// SampleGPUUse says whether any GPU of this VM was at work in the last moment, by
// nvidia-smi. known is false where that cannot be told: a simulator plays the VM,
// there is no nvidia-smi, it fails, or a card does not say.
func SampleGPUUse(ctx context.Context, seed *agentv1.Seed) (working, known bool) {
	if seed.GetSimulated() || seed.GetGpuCount() == 0 {
		return false, false
	}
	path, err := exec.LookPath("nvidia-smi")
	if err != nil {
		return false, false
	}
	ctx, cancel := context.WithTimeout(ctx, gpuListTime)
	defer cancel()
	out, err := exec.CommandContext(ctx, path, "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits").Output()
	if err != nil {
		return false, false
	}
	return parseUse(out)
}

// parseUse reads one percentage a line. One card that works is work, whatever the
// others say.
func parseUse(out []byte) (working, known bool) {
	lines := strings.Fields(string(out))
	known = len(lines) > 0
	for _, line := range lines {
		percent, err := strconv.Atoi(line)
		known = known && err == nil
		working = working || err == nil && percent > 0
	}
	return working, known || working
}
