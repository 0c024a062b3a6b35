package mesh_test

import (
	"context"
	"encoding/binary"
	"testing"
	"time"

	"github.com/cosmicac/cosmicac/pkg/identity"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	"github.com/libp2p/go-libp2p"
	"github.com/libp2p/go-libp2p/core/host"
	"github.com/libp2p/go-libp2p/core/network"
	"github.com/libp2p/go-libp2p/core/peer"
	"github.com/libp2p/go-libp2p/core/protocol"
	libp2ptls "github.com/libp2p/go-libp2p/p2p/security/tls"
	quic "github.com/libp2p/go-libp2p/p2p/transport/quic"
	"github.com/libp2p/go-libp2p/p2p/transport/tcp"
)

// rude is a bare libp2p host with none of our manners.
func rude(t *testing.T, to *spot, before ...func(host.Host)) host.Host {
	t.Helper()
	h, err := libp2p.New(libp2p.NoListenAddrs, libp2p.DisableMetrics(), libp2p.Transport(tcp.NewTCPTransport), libp2p.Transport(quic.NewTransport), libp2p.Security(libp2ptls.ID, libp2ptls.New),
		libp2p.ResourceManager(&network.NullResourceManager{}))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = h.Close() })
	for _, f := range before {
		f(h)
	}
	at, err := peer.AddrInfoFromString(to.Addresses()[0])
	if err == nil {
		err = h.Connect(within(t), *at)
	}
	if err != nil {
		t.Fatal(err)
	}
	return h
}

func TestAgentIsKeptOutOfTheDHT(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	ork := l.start(l.ork, func(o *mesh.Options) { o.Role = meshv1.Role_ROLE_ORK })
	kad := protocol.ID("/cosmicac/" + l.founder.ID().String() + "/kad/kad/1.0.0")
	ask := func(key *identity.Key, credential mesh.Credential) error {
		from := l.start(key, func(o *mesh.Options) {
			o.Network, o.Credential, o.DHT, o.Listen = l.bare(), credential, mesh.DHTOff, nil
		})
		if err := ping(within(t), from.Node, ork.ID(), ork.Addresses()...); err != nil {
			t.Fatal(err)
		}
		s, err := from.Host().NewStream(within(t), ork.ID(), kad)
		if err != nil {
			return err
		}
		defer s.Close()
		_ = s.SetDeadline(time.Now().Add(patience))
		if _, err := s.Write([]byte{2, 8, 5}); err != nil { // a kad PING
			return err
		}
		_, err = s.Read(make([]byte, 1))
		return err
	}
	key, certificate := l.agent("j-0000000000001")
	if err := ask(key, mesh.Certificate(certificate)); err == nil {
		t.Error("an agent's kad stream was answered")
	}
	if err := ask(l.app, mesh.Membership()); err != nil {
		t.Errorf("a member's kad stream: %v", err)
	}
}

func TestRudeStrangersAreCutOff(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	a := l.start(l.ork, func(o *mesh.Options) { o.Role = meshv1.Role_ROLE_ORK }, func(s *spot) {
		s.Handle("http", &meshv1.Right{Guests: true, Members: true}, func(context.Context, *mesh.Stream) { t.Error("served a stranger") })
	})
	id := l.founder.ID()
	admit := protocol.ID("/cosmicac/" + id.String() + "/admit/1")
	cut := func(h host.Host) bool { return h.Network().Connectedness(a.ID()) != network.Connected }

	for name, frame := range map[string][]byte{
		"oversized": append(binary.AppendUvarint(nil, 20<<10), make([]byte, 20<<10)...),
		"lying":     binary.AppendUvarint(nil, 1<<50),
		"broken":    {3, 0xff, 0xff, 0xff},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := rude(t, a)
			s, err := h.NewStream(within(t), a.ID(), admit)
			if err == nil {
				_, _ = s.Write(frame) // it may be cut off while it writes
			}
			eventually(t, "cut", func() bool { return cut(h) })
		})
	}
	t.Run("truncated and slow", func(t *testing.T) {
		t.Parallel()
		h := rude(t, a)
		s, err := h.NewStream(within(t), a.ID(), admit)
		if err == nil {
			_, _ = s.Write([]byte{100, 1, 2})
		}
		eventually(t, "cut", func() bool { return cut(h) })
	})
	t.Run("silent", func(t *testing.T) {
		t.Parallel()
		h := rude(t, a)
		eventually(t, "cut", func() bool { return cut(h) })
	})
	t.Run("skips the dialogue", func(t *testing.T) {
		t.Parallel()
		h := rude(t, a)
		for _, name := range []string{"/cosmicac/" + id.String() + "/http/1", "/cosmicac/" + id.String() + "/grpc/1", "/cosmicac/" + id.String() + "/kad/kad/1.0.0"} {
			s, err := h.NewStream(within(t), a.ID(), protocol.ID(name))
			if err != nil {
				continue // refused even before
			}
			_ = s.SetDeadline(time.Now().Add(patience))
			_, _ = s.Write([]byte("GET / HTTP/1.1\r\n\r\n"))
			if n, err := s.Read(make([]byte, 100)); err == nil {
				t.Errorf("%s answered %d bytes", name, n)
			}
		}
	})
}
