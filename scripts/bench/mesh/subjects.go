package main

import (
	"bufio"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"time"

	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	"github.com/libp2p/go-libp2p/core/peer"
	natsserver "github.com/nats-io/nats-server/v2/server"
	nats "github.com/nats-io/nats.go"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/protobuf/proto"
)

// call makes one call that answers with its payload. It belongs to one caller.
type call func(ctx context.Context, payload []byte) error

// client is the calling end of one subject.
type client struct {
	// caller makes a caller's call; nil if the subject has no calls.
	caller func() (call, error)
	// stream opens a byte stream to the server's serveBulk; nil if there is none.
	stream func(ctx context.Context) (io.ReadWriteCloser, error)
}

// stack is how a subject written in Go serves and calls.
type stack struct {
	// serve answers until the process ends. The endpoint is what open needs.
	serve func(s *NodeSpec) (endpoint any, err error)
	open  func(s *NodeSpec, endpoint []byte) (*client, error)
}

var stacks = map[string]stack{
	"mesh": {serveMesh, openMesh},
	"grpc": {serveGRPC, openGRPC},
	"nats": {serveNATS, openNATS},
	"tls":  {serveTLS, openTLS},
	"raw":  {serveRaw, openRaw},
}

// MeshEndpoint is where a node is.
type MeshEndpoint struct {
	Key       string
	Addresses []string
	Listening int64 // since when, Unix nanoseconds
}

func serveMesh(s *NodeSpec) (any, error) {
	n, err := s.start()
	if err != nil {
		return nil, err
	}
	return &MeshEndpoint{n.ID().String(), n.Addresses(), time.Now().UnixNano()}, nil
}

func openMesh(s *NodeSpec, endpoint []byte) (*client, error) {
	var e MeshEndpoint
	if err := json.Unmarshal(endpoint, &e); err != nil {
		return nil, err
	}
	to, err := peer.Decode(e.Key)
	if err != nil {
		return nil, err
	}
	n, err := s.start()
	if err != nil {
		return nil, err
	}
	stub := meshv1.NewNodeClient(n.Client(to, e.Addresses...))
	return &client{
		caller: func() (call, error) { return ping(stub), nil },
		stream: func(ctx context.Context) (io.ReadWriteCloser, error) { return n.OpenStream(ctx, to, bulkName) },
	}, nil
}

func ping(stub meshv1.NodeClient) call {
	return func(ctx context.Context, payload []byte) error {
		answer, err := stub.Ping(ctx, &meshv1.PingRequest{Payload: payload})
		if err != nil {
			return err
		}
		return sameLength(answer, payload)
	}
}

func sameLength(answer *meshv1.PingResponse, payload []byte) error {
	if len(answer.GetPayload()) != len(payload) {
		return fmt.Errorf("an answer of %d bytes to %d", len(answer.GetPayload()), len(payload))
	}
	return nil
}

// NetEndpoint is where a subject listens, and its certificate.
type NetEndpoint struct {
	Address     string
	Certificate []byte
}

// secure makes a certificate for the loopback address and the servers' settings.
func secure(protocols ...string) (*tls.Config, []byte, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	t := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, t, t, key.Public(), key)
	if err != nil {
		return nil, nil, err
	}
	return &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}, NextProtos: protocols, MinVersion: tls.VersionTLS13}, der, nil
}

// trusting reads an endpoint and makes the settings that trust its certificate.
func trusting(endpoint []byte, protocols ...string) (e NetEndpoint, c *tls.Config, err error) {
	if err := json.Unmarshal(endpoint, &e); err != nil {
		return e, nil, err
	}
	cert, err := x509.ParseCertificate(e.Certificate)
	if err != nil {
		return e, nil, err
	}
	pool := x509.NewCertPool()
	pool.AddCert(cert)
	return e, &tls.Config{RootCAs: pool, ServerName: "127.0.0.1", NextProtos: protocols, MinVersion: tls.VersionTLS13}, nil
}

func listen() (net.Listener, error) { return net.Listen("tcp", "127.0.0.1:0") }

func serveGRPC(*NodeSpec) (any, error) {
	c, der, err := secure("h2")
	if err != nil {
		return nil, err
	}
	l, err := listen()
	if err != nil {
		return nil, err
	}
	s := grpc.NewServer(grpc.Creds(credentials.NewTLS(c)))
	meshv1.RegisterNodeServer(s, &nodeService{})
	go func() { broke("serve gRPC", s.Serve(l)) }()
	return &NetEndpoint{l.Addr().String(), der}, nil
}

func openGRPC(_ *NodeSpec, endpoint []byte) (*client, error) {
	e, c, err := trusting(endpoint, "h2")
	if err != nil {
		return nil, err
	}
	conn, err := grpc.NewClient("passthrough:///"+e.Address, grpc.WithTransportCredentials(credentials.NewTLS(c)))
	if err != nil {
		return nil, err
	}
	stub := meshv1.NewNodeClient(conn)
	return &client{caller: func() (call, error) { return ping(stub), nil }}, nil
}

// natsSubject is where the responder listens.
const natsSubject = "ping"

// serveNATS runs the broker and the responder in this process.
func serveNATS(*NodeSpec) (any, error) {
	c, der, err := secure()
	if err != nil {
		return nil, err
	}
	s, err := natsserver.NewServer(&natsserver.Options{Host: "127.0.0.1", Port: natsserver.RANDOM_PORT, NoSigs: true, NoLog: true, TLSConfig: c, TLSTimeout: 5})
	if err != nil {
		return nil, err
	}
	go s.Start()
	if !s.ReadyForConnections(20 * time.Second) {
		return nil, errors.New("the NATS server is not ready after 20 s")
	}
	e := &NetEndpoint{s.Addr().String(), der}
	encoded, err := json.Marshal(e)
	if err != nil {
		return nil, err
	}
	conn, err := dialNATS(encoded)
	if err != nil {
		return nil, err
	}
	_, err = conn.Subscribe(natsSubject, func(m *nats.Msg) {
		var in meshv1.PingRequest
		err := proto.Unmarshal(m.Data, &in)
		if err == nil {
			var out []byte
			if out, err = proto.Marshal(&meshv1.PingResponse{Payload: in.GetPayload()}); err == nil {
				err = m.Respond(out)
			}
		}
		if err != nil {
			broke("answer over NATS", err)
		}
	})
	if err != nil {
		return nil, err
	}
	return e, conn.Flush()
}

func dialNATS(endpoint []byte) (*nats.Conn, error) {
	e, c, err := trusting(endpoint)
	if err != nil {
		return nil, err
	}
	return nats.Connect("tls://"+e.Address, nats.Secure(c))
}

func openNATS(_ *NodeSpec, endpoint []byte) (*client, error) {
	conn, err := dialNATS(endpoint)
	if err != nil {
		return nil, err
	}
	return &client{caller: func() (call, error) {
		return func(ctx context.Context, payload []byte) error {
			request, err := proto.Marshal(&meshv1.PingRequest{Payload: payload})
			if err != nil {
				return err
			}
			m, err := conn.RequestWithContext(ctx, natsSubject, request)
			if err != nil {
				return err
			}
			var answer meshv1.PingResponse
			if err := proto.Unmarshal(m.Data, &answer); err != nil {
				return err
			}
			return sameLength(&answer, payload)
		}, nil
	}}, nil
}

func serveTLS(*NodeSpec) (any, error) {
	c, der, err := secure()
	if err != nil {
		return nil, err
	}
	l, err := listen()
	if err != nil {
		return nil, err
	}
	go accept(tls.NewListener(l, c), serveBulk)
	return &NetEndpoint{l.Addr().String(), der}, nil
}

func openTLS(_ *NodeSpec, endpoint []byte) (*client, error) {
	e, c, err := trusting(endpoint)
	if err != nil {
		return nil, err
	}
	return &client{stream: func(ctx context.Context) (io.ReadWriteCloser, error) {
		return (&tls.Dialer{Config: c}).DialContext(ctx, "tcp", e.Address)
	}}, nil
}

// RawEndpoint is where calls and where byte streams are answered.
type RawEndpoint struct{ Calls, Bulk string }

func serveRaw(*NodeSpec) (any, error) {
	calls, err := listen()
	if err != nil {
		return nil, err
	}
	bulk, err := listen()
	if err != nil {
		return nil, err
	}
	go accept(calls, func(c io.ReadWriter) {
		r := bufio.NewReaderSize(c, 16<<10)
		for {
			var in meshv1.PingRequest
			if readMessage(r, &in) != nil || writeMessage(c, &meshv1.PingResponse{Payload: in.GetPayload()}) != nil {
				return // the caller is gone
			}
		}
	})
	go accept(bulk, serveBulk)
	return &RawEndpoint{calls.Addr().String(), bulk.Addr().String()}, nil
}

// openRaw gives every caller a connection of its own: the least that an answer
// over the network costs.
func openRaw(_ *NodeSpec, endpoint []byte) (*client, error) {
	var e RawEndpoint
	if err := json.Unmarshal(endpoint, &e); err != nil {
		return nil, err
	}
	return &client{
		caller: func() (call, error) {
			c, err := net.Dial("tcp", e.Calls)
			if err != nil {
				return nil, err
			}
			r := bufio.NewReaderSize(c, 16<<10)
			return func(_ context.Context, payload []byte) error {
				if err := writeMessage(c, &meshv1.PingRequest{Payload: payload}); err != nil {
					return err
				}
				var answer meshv1.PingResponse
				if err := readMessage(r, &answer); err != nil {
					return err
				}
				return sameLength(&answer, payload)
			}, nil
		},
		stream: func(ctx context.Context) (io.ReadWriteCloser, error) {
			return (&net.Dialer{}).DialContext(ctx, "tcp", e.Bulk)
		},
	}, nil
}

func accept(l net.Listener, serve func(io.ReadWriter)) {
	for {
		c, err := l.Accept()
		if err != nil {
			broke("accept", err)
		}
		go func() {
			defer c.Close()
			serve(c)
		}()
	}
}

func writeMessage(w io.Writer, m proto.Message) error {
	b := make([]byte, 4, 4+proto.Size(m))
	b, err := proto.MarshalOptions{UseCachedSize: true}.MarshalAppend(b, m)
	if err != nil {
		return err
	}
	binary.BigEndian.PutUint32(b, uint32(len(b)-4))
	_, err = w.Write(b)
	return err
}

func readMessage(r io.Reader, m proto.Message) error {
	var head [4]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return err
	}
	b := make([]byte, binary.BigEndian.Uint32(head[:]))
	if _, err := io.ReadFull(r, b); err != nil {
		return err
	}
	return proto.Unmarshal(b, m)
}
