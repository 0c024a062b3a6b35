package app

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protojson"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"
)

// The test binary runs itself as a worker process that can be killed.
const (
	helperEnv  = "COSMICAC_TEST_HELPER_RACK"
	helperReq  = "COSMICAC_TEST_HELPER_REQUEST"
	helperFile = "COSMICAC_TEST_HELPER_KUBECONFIG"
	// asDaemon makes it the whole daemon.
	asDaemon = "COSMICAC_TEST_AS_DAEMON"
)

// helper is a worker that applies one attempt and goes on until it is killed.
func helper() int {
	rack := os.Getenv(helperEnv)
	w, err := Build(setup(config(&devcluster{kubeconfig: os.Getenv(helperFile)}, rack), "host:/state"))
	if err != nil {
		fmt.Println(err)
		return 1
	}
	for _, task := range w.Tasks {
		go func() {
			if err := task.Run(context.Background()); err != nil {
				fmt.Println(task.Name, err)
				os.Exit(1)
			}
		}()
	}
	w.Entry.Put(&orkv1.RackEntry{Id: rack})
	req := &workerv1.ApplyAttemptRequest{}
	if err := protojson.Unmarshal([]byte(os.Getenv(helperReq)), req); err != nil {
		fmt.Println(err)
		return 1
	}
	for {
		r, _ := w.Hub.Latest()
		if w.Tenure.Held() && r.GetSynced() {
			break
		}
		time.Sleep(20 * time.Millisecond)
	}
	fmt.Println("applying")
	for {
		if res, err := w.Server.ApplyAttempt(context.Background(), req); err == nil {
			fmt.Println("claimed", res.Claimed, res.Message)
			break
		}
		time.Sleep(50 * time.Millisecond)
	}
	select {}
}

// startHelper runs a worker as a process of its own. It returns once that
// process is about to apply; kill ends it without a goodbye.
func startHelper(t *testing.T, d *devcluster, rack string, req *workerv1.ApplyAttemptRequest) (kill func()) {
	t.Helper()
	raw, err := protojson.Marshal(req)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), helperEnv+"="+rack, helperReq+"="+string(raw), helperFile+"="+d.kubeconfig)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	dead := false
	kill = func() {
		if !dead {
			dead = true
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		}
	}
	t.Cleanup(kill)
	buf := make([]byte, 4096)
	n, err := out.Read(buf)
	if err != nil || string(buf[:n]) != "applying\n" {
		t.Fatalf("the worker process says %q, %v", buf[:n], err)
	}
	return kill
}
