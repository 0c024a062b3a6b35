package main

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/goccy/go-yaml"
	"github.com/hashicorp/go-hclog"
	"google.golang.org/protobuf/encoding/protojson"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"

	"github.com/cosmicac/cosmicac/pkg/identity"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	"github.com/cosmicac/cosmicac/pkg/trust"
	agentv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/agent/v1"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/seed"
)

// stubs plays the agents of all machines that run: each on a mesh node and with
// a key of its own, as in a VM.
type stubs struct {
	ctx    context.Context
	client dynamic.Interface
	wg     sync.WaitGroup

	mu    sync.Mutex
	alive map[string]context.CancelFunc // by machine
	err   error
}

func newStubs(ctx context.Context, client dynamic.Interface) *stubs {
	return &stubs{ctx: ctx, client: client, alive: map[string]context.CancelFunc{}}
}

// hear starts a machine's agent when it runs, and ends it when it is deleted.
func (s *stubs) hear(vmi *unstructured.Unstructured) {
	s.mu.Lock()
	defer s.mu.Unlock()
	name := vmi.GetName()
	end, alive := s.alive[name]
	phase, _, _ := unstructured.NestedString(vmi.Object, "status", "phase")
	switch {
	case alive && (vmi.GetDeletionTimestamp() != nil || phase != "Running"):
		end()
		delete(s.alive, name)
	case !alive && phase == "Running" && vmi.GetDeletionTimestamp() == nil:
		ctx, cancel := context.WithCancel(s.ctx)
		s.alive[name] = cancel
		s.wg.Go(func() {
			if err := s.play(ctx, name); err != nil && ctx.Err() == nil {
				s.mu.Lock()
				s.err = errors.Join(s.err, fmt.Errorf("agent of %s: %w", name, err))
				s.mu.Unlock()
			}
		})
	}
}

func (s *stubs) failure() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

func (s *stubs) stop() {
	s.mu.Lock()
	for _, end := range s.alive {
		end()
	}
	s.mu.Unlock()
	s.wg.Wait()
}

// play is one agent's life: seed, key, token, certificate, then one stream on
// which it says that it is ready, until ctx ends.
func (s *stubs) play(ctx context.Context, machine string) error {
	doc, err := s.seed(ctx, machine)
	if err != nil {
		return err
	}
	key, err := identity.New(rand.Reader)
	if err != nil {
		return err
	}
	network, err := trust.NewMemory(doc.NetworkId, doc.RootKeys)
	if err != nil {
		return err
	}
	ork, err := identity.ParseID(doc.OrkKey)
	if err != nil {
		return err
	}
	node, err := mesh.New(ctx, mesh.Options{
		Key: key, Network: network, Credential: mesh.JoinToken(doc.JoinToken, ork), Log: hclog.NewNullLogger(), Listen: []string{"/ip4/127.0.0.1/tcp/0"},
		Card: func(c *meshv1.Card) { c.JobId, c.ReplicaId, c.AttemptId = doc.JobId, doc.ReplicaId, doc.AttemptId },
	})
	if err != nil {
		return err
	}
	if err := node.Start(ctx); err != nil {
		return err
	}
	defer func() {
		ending, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer cancel()
		_ = node.Close(ending)
	}()
	desk := orkv1.NewAgentsClient(node.Client(ork, doc.OrkAddresses...))
	for pause := 200 * time.Millisecond; ; pause = min(2*pause, 5*time.Second) {
		r, err := desk.RedeemToken(ctx, &orkv1.RedeemTokenRequest{JoinToken: doc.JoinToken})
		if err == nil {
			node.SetCredential(mesh.Certificate(r.CertificateEnvelope))
			break
		}
		if ctx.Err() != nil {
			return nil
		}
		say("agent of %s is not let in yet: %v", machine, err)
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pause):
		}
	}
	for n := uint64(1); ctx.Err() == nil; n++ {
		stream, err := desk.Attend(ctx)
		if err == nil {
			err = stream.Send(&orkv1.AttendRequest{Report: &agentv1.Report{Sequence: n, Phase: agentv1.Phase_PHASE_READY, Simulated: true}})
		}
		for err == nil {
			_, err = stream.Recv()
		}
		select {
		case <-ctx.Done():
		case <-time.After(time.Second):
		}
	}
	return nil
}

// seed reads the document out of a machine's Secret, as cloud-init would.
func (s *stubs) seed(ctx context.Context, machine string) (*agentv1.Seed, error) {
	secret, err := s.client.Resource(schema.GroupVersionResource{Version: "v1", Resource: "secrets"}).Namespace(namespace).Get(ctx, machine+"-seed", metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	encoded, _, err := unstructured.NestedString(secret.Object, "data", seed.KeyUserData)
	if err != nil {
		return nil, err
	}
	user, err := base64.StdEncoding.DecodeString(encoded)
	if err != nil {
		return nil, err
	}
	var cloud struct {
		Files []struct {
			Path    string `yaml:"path"`
			Content string `yaml:"content"`
		} `yaml:"write_files"`
	}
	if err := yaml.Unmarshal(user, &cloud); err != nil {
		return nil, err
	}
	for _, file := range cloud.Files {
		if file.Path != seed.SeedFile {
			continue
		}
		raw, err := base64.StdEncoding.DecodeString(file.Content)
		if err != nil {
			return nil, err
		}
		doc := &agentv1.Seed{}
		return doc, protojson.Unmarshal(raw, doc)
	}
	return nil, fmt.Errorf("no %s in the seed of %s", seed.SeedFile, machine)
}

// kindOf finds the resource of an object.
func kindOf(o *unstructured.Unstructured) (schema.GroupVersionResource, bool) {
	guess, _ := meta.UnsafeGuessKindToResource(o.GroupVersionKind())
	for _, kind := range kinds {
		if kind == guess {
			return kind, true
		}
	}
	return schema.GroupVersionResource{}, false
}

func ignoreGone(err error) error {
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}
