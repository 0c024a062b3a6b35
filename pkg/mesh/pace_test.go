package mesh_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"hash"
	"io"
	"sync"
	"testing"
	"time"

	"github.com/cosmicac/cosmicac/pkg/mesh"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
)

// One bulk stream's reader has stopped: another bulk stream to the same peer
// arrives whole, and calls pass.
func TestAStoppedReaderHoldsUpNobodyElse(t *testing.T) {
	t.Parallel()
	for transport, listen := range transports {
		t.Run(transport, func(t *testing.T) {
			t.Parallel()
			l := newLab(t)
			arrived := make(chan []byte, 1)
			b := l.start(l.app, func(o *mesh.Options) { o.Listen = listen }, func(s *spot) {
				s.Handle("stopped", &meshv1.Right{Members: true}, func(ctx context.Context, _ *mesh.Stream) { <-ctx.Done() })
				s.Handle("sum", &meshv1.Right{Members: true}, func(_ context.Context, st *mesh.Stream) {
					var h hash.Hash = sha256.New()
					_, _ = io.Copy(h, st)
					arrived <- h.Sum(nil)
				})
			})
			a := l.start(l.ork, func(o *mesh.Options) { o.Listen = listen })
			stopped, err := a.OpenStream(within(t), b.ID(), "stopped", b.Addresses()...)
			if err != nil {
				t.Fatal(err)
			}
			var writing sync.WaitGroup
			writing.Go(func() { _, _ = io.Copy(stopped, endless{}) })
			defer writing.Wait()
			defer stopped.Close()

			data := make([]byte, 24<<20)
			_, _ = rand.Read(data)
			st, err := a.OpenStream(within(t), b.ID(), "sum")
			if err != nil {
				t.Fatal(err)
			}
			var calling sync.WaitGroup
			calling.Go(func() {
				for range 50 {
					if err := ping(within(t), a.Node, b.ID()); err != nil {
						t.Errorf("beside the bulk: %v", err)
					}
				}
			})
			if _, err := st.Write(data); err != nil {
				t.Fatal(err)
			}
			if err := st.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
				t.Fatal(err)
			}
			calling.Wait()
			want := sha256.Sum256(data)
			select {
			case got := <-arrived:
				if !bytes.Equal(got, want[:]) {
					t.Error("the bulk arrived changed")
				}
			case <-time.After(patience):
				t.Error("the bulk did not arrive")
			}
			_ = st.Close()
		})
	}
}

type endless struct{}

func (endless) Read(b []byte) (int, error) { return len(b), nil }
