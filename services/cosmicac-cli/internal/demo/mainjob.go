package demo

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/creack/pty"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/services/cosmicac-cli/internal/client"
)

// cli runs the real CLI binary as the demo's user. Output goes to the user's
// eyes and comes back.
func (d *Demo) cli(ctx context.Context, stdin string, show bool, env []string, args ...string) (string, error) {
	if show {
		fmt.Fprintf(d.o.Out, "\n$ cosmicac %s\n", strings.Join(quoted(args), " "))
	}
	cmd := exec.CommandContext(ctx, filepath.Join(d.o.Bin, "cosmicac"), args...)
	cmd.Env = append(d.environment(), env...)
	cmd.Stdin = strings.NewReader(stdin)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if show {
		cmd.Stdout, cmd.Stderr = io.MultiWriter(&out, d.o.Out), d.o.Out
	}
	cmd.WaitDelay = 5 * time.Second
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("%w: cosmicac %s: %w: %s", errShort, strings.Join(quoted(args), " "), err, strings.TrimSpace(out.String()))
	}
	return out.String(), nil
}

// outside is this process's environment without what would override a config.
func outside() []string {
	var env []string
	for _, kv := range os.Environ() {
		if !strings.HasPrefix(kv, "COSMICAC_") {
			env = append(env, kv)
		}
	}
	return env
}

func (d *Demo) environment() []string {
	return append(outside(), "COSMICAC_CONFIG_DIR="+filepath.Join(d.dir, "user"))
}

func quoted(args []string) []string {
	out := make([]string, len(args))
	for i, a := range args {
		if out[i] = a; a == "" || strings.ContainsAny(a, " \t\"'$&|;<>()") {
			out[i] = "'" + strings.ReplaceAll(a, "'", `'\''`) + "'"
		}
	}
	return out
}

func (d *Demo) registerRacks(ctx context.Context) error {
	if _, err := d.cli(ctx, d.password+"\n", false, nil, "login", d.URL(), "--email", Email); err != nil {
		return err
	}
	for _, rack := range []string{"us", "in"} {
		for _, x := range d.daemons {
			if x.Name == "worker-"+rack {
				if _, err := d.cli(ctx, "", false, nil, "racks", "register", rack, "--location", rack, "--key", d.status(x).Key, "--board-gpus", "1,2,4,8"); err != nil {
					return err
				}
			}
		}
	}
	return d.waitFor(ctx, "the two racks", 2*time.Minute, "worker-us", func() bool {
		racks, err := d.racks(ctx)
		if err != nil || len(racks) < 2 {
			return false
		}
		for _, r := range racks {
			if !r.Connected || len(r.Nodes) == 0 {
				return false
			}
		}
		return true
	})
}

func (d *Demo) racks(ctx context.Context) ([]client.Rack, error) {
	raw, err := d.cli(ctx, "", false, nil, "racks", "list", "-o", "json")
	if err != nil {
		return nil, err
	}
	var list struct {
		Racks []client.Rack `json:"racks"`
	}
	return list.Racks, json.Unmarshal([]byte(raw), &list)
}

// MainJob is what the platform is for: a GPU Container Job with a shell, a
// Managed Inference Job with a streamed completion, and nothing left after.
func (d *Demo) MainJob(ctx context.Context) error {
	fmt.Fprintf(d.o.Out, "\n== 1. A GPU Container Job and a shell into it\n")
	if _, err := d.cli(ctx, d.password+"\n", true, nil, "login", d.URL(), "--email", Email); err != nil {
		return err
	}
	if _, err := d.cli(ctx, "", true, nil, "gpus", "available"); err != nil {
		return err
	}
	if _, err := d.cli(ctx, "", true, nil, "jobs", "create", "--kind", "gpu-container", "--name", "lab", "--location", "us",
		"--gpu", "GH100_H100_SXM5_80GB", "--gpus", "2", "--image", "Ubuntu22.04/CUDA12.8.1", "--disk", "40", "--wait"); err != nil {
		return err
	}
	hello, err := d.cli(ctx, "", true, nil, "jobs", "exec", "lab", "--", "sh", "-c", `echo "host $(hostname), user $(id -un), home $HOME"`)
	if err != nil {
		return err
	}
	if !strings.Contains(hello, "user ubuntu") && os.Geteuid() == 0 {
		return fmt.Errorf("%w: a command in the VM ran as the wrong user: %s", errShort, strings.TrimSpace(hello))
	}
	if err := d.exitStatus(ctx); err != nil {
		return err
	}
	if err := d.shell(ctx); err != nil {
		return err
	}

	fmt.Fprintf(d.o.Out, "\n== 2. A Managed Inference Job and a streamed completion\n")
	if _, err := d.cli(ctx, "", true, nil, "jobs", "create", "--kind", "managed-inference", "--name", "chat", "--location", "in",
		"--model", "cosmicac/ngram-demo", "--gpu", "GA100_A100_PCIE_80GB", "--gpus", "1", "--wait"); err != nil {
		return err
	}
	made, err := d.cli(ctx, "", false, nil, "api-keys", "create", "demo", "-o", "json")
	if err != nil {
		return err
	}
	var key struct {
		APIKey client.APIKey `json:"api_key"`
		Key    string        `json:"key"`
	}
	if err := json.Unmarshal([]byte(made), &key); err != nil {
		return err
	}
	fmt.Fprintf(d.o.Out, "\n$ cosmicac api-keys create demo\nmade key %s, secret kept in COSMICAC_API_KEY for the next command\n", key.APIKey.PublicID)
	var answer string
	err = d.retry(ctx, time.Minute, func() error {
		answer, err = d.cli(ctx, "", true, []string{"COSMICAC_API_KEY=" + key.Key}, "inference", "chat", "--model", "cosmicac/ngram-demo", "--max-tokens", "60", "Who grants a GPU?")
		return err
	})
	if err != nil {
		return err
	}
	if strings.TrimSpace(answer) == "" {
		return fmt.Errorf("%w: the model streamed nothing", errShort)
	}
	if err := d.usage(ctx, key.APIKey.ID); err != nil {
		return err
	}

	fmt.Fprintf(d.o.Out, "\n== 3. Both deleted; nothing is left\n")
	for _, name := range []string{"lab", "chat"} {
		if _, err := d.cli(ctx, "", true, nil, "jobs", "delete", name, "--wait"); err != nil {
			return err
		}
	}
	return d.nothingLeft(ctx)
}

// retry tries again until limit; only for what takes a moment to spread, as a
// new API key to the proxies.
func (d *Demo) retry(ctx context.Context, limit time.Duration, try func() error) error {
	deadline := time.Now().Add(limit)
	for {
		err := try()
		if err == nil || ctx.Err() != nil || time.Now().After(deadline) {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(time.Second):
		}
	}
}

// exitStatus proves that a remote command's status is the CLI's own.
func (d *Demo) exitStatus(ctx context.Context) error {
	fmt.Fprintf(d.o.Out, "\n$ cosmicac jobs exec lab -- sh -c 'exit 37'; echo $?\n")
	cmd := exec.CommandContext(ctx, filepath.Join(d.o.Bin, "cosmicac"), "jobs", "exec", "lab", "--", "sh", "-c", "exit 37")
	cmd.Env = d.environment()
	out, _ := cmd.CombinedOutput()
	fmt.Fprintln(d.o.Out, cmd.ProcessState.ExitCode())
	if cmd.ProcessState.ExitCode() != 37 {
		return fmt.Errorf("%w: exit status %d came back as %d: %s", errShort, 37, cmd.ProcessState.ExitCode(), out)
	}
	return nil
}

// shell types into an interactive shell on a terminal of its own.
func (d *Demo) shell(ctx context.Context) error {
	fmt.Fprintf(d.o.Out, "\n$ cosmicac jobs shell lab\n")
	cmd := exec.CommandContext(ctx, filepath.Join(d.o.Bin, "cosmicac"), "jobs", "shell", "lab")
	cmd.Env = append(d.environment(), "TERM=dumb")
	f, err := pty.StartWithSize(cmd, &pty.Winsize{Rows: 31, Cols: 97})
	if err != nil {
		return fmt.Errorf("%w: start a shell: %w", errShort, err)
	}
	defer f.Close()
	var out bytes.Buffer
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _ = io.Copy(io.MultiWriter(&out, d.o.Out), f)
	}()
	for _, line := range []string{"stty size", "echo shell on $(hostname)", "exit"} {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(700 * time.Millisecond):
		}
		if _, err := io.WriteString(f, line+"\n"); err != nil {
			break
		}
	}
	err = cmd.Wait()
	<-done
	if err != nil {
		return fmt.Errorf("%w: the shell ended with %w", errShort, err)
	}
	if !strings.Contains(out.String(), "31 97") {
		return fmt.Errorf("%w: the shell's terminal does not have this terminal's size", errShort)
	}
	return nil
}

// usage waits until the ledger holds the completion just made.
func (d *Demo) usage(ctx context.Context, keyID string) error {
	err := d.retry(ctx, time.Minute, func() error {
		raw, err := d.cli(ctx, "", false, nil, "api-keys", "usage", "--api-key-id", keyID, "-o", "json")
		if err != nil {
			return err
		}
		var list struct {
			Buckets []client.UsageBucket `json:"buckets"`
		}
		if err := json.Unmarshal([]byte(raw), &list); err != nil {
			return err
		}
		for _, b := range list.Buckets {
			if b.CompletionTokens > 0 {
				return nil
			}
		}
		return fmt.Errorf("%w: the usage ledger does not have the completion", errShort)
	})
	if err != nil {
		return err
	}
	_, err = d.cli(ctx, "", true, nil, "api-keys", "usage", "--api-key-id", keyID)
	return err
}

// nothingLeft asks the cluster itself, and the racks, what remains.
func (d *Demo) nothingLeft(ctx context.Context) error {
	var left []string
	err := d.retry(ctx, time.Minute, func() error {
		var err error
		if left, err = d.leftInCluster(ctx); err != nil {
			return err
		}
		if len(left) > 0 {
			return fault.New(fault.FailedPrecondition, "left in the cluster: %s", strings.Join(left, ", "))
		}
		racks, err := d.racks(ctx)
		if err != nil {
			return err
		}
		for _, r := range racks {
			for _, n := range r.Nodes {
				for _, g := range n.GPUs {
					if g.Held != 0 || g.Offerable != g.Total {
						return fault.New(fault.FailedPrecondition, "%s on %s: %d of %d held, %d offerable", g.Model, n.Name, g.Held, g.Total, g.Offerable)
					}
				}
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("%w: %w", errShort, err)
	}
	fmt.Fprintf(d.o.Out, "\nthe cluster holds no VM, disk, volume, launcher pod, secret, policy or anchor of ours\n")
	_, err = d.cli(ctx, "", true, nil, "racks", "list")
	return err
}
