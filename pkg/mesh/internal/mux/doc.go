// Package mux carries many streams over one secured connection. It speaks yamux
// (/yamux/1.0.0, the library's own) with peers that use either, and takes the
// library's place for what that one costs: here the goroutine that has a frame
// writes it, so a call wakes nobody to be sent, and an idle connection holds one
// goroutine and next to no buffers instead of three goroutines and 15 KB.
//
// Guarantees. Bytes of a stream arrive once and in order, or its reader is told that
// it broke. A stream's Write blocks while the peer's window is full, or while more
// than queueBytes wait for the connection; its deadline ends that. Who reads nothing
// makes this end hold one window a stream: 256 KiB, up to 16 MiB for a reader that
// keeps up. A peer is asked for life after KeepAlive of silence, and the
// connection ends when there is none within WriteTimeout; a write that takes as
// long ends it too. Memory of streams is taken from the peer's share of the
// resource manager, and a stream that finds none there is refused alone.
//
// It knows nothing of peers, protocols or what the streams carry.
package mux

import (
	"encoding/binary"
	"time"
)

// ID is the protocol that this package speaks.
const ID = "/yamux/1.0.0"

// A frame is a header and, of data, as many bytes as length says:
//
//	version 1 byte, 0
//	kind    1 byte
//	flags   2 bytes
//	stream  4 bytes: odd of the side that dialed, even of the other, 0 the connection
//	length  4 bytes: of data; a window's growth, a reset's code, a ping's number
const (
	kindData   = 0
	kindWindow = 1
	kindPing   = 2
	kindGoAway = 3

	flagOpen   = 1 // of a ping: the question
	flagOpened = 2 // of a ping: the answer
	flagEnd    = 4
	flagReset  = 8

	headerBytes = 12
)

const (
	// firstWindow is what yamux lets a stream send before it hears of more.
	firstWindow = 256 << 10
	largeWindow = 16 << 20
	// frameBytes is the most that one frame takes, so that others get their turn.
	frameBytes = 64<<10 - headerBytes
	// queueBytes may wait for the connection before those who add more wait too.
	queueBytes = 256 << 10
	// answersBytes may wait of what a peer causes by itself, such as resets.
	answersBytes = 1 << 20
	// backlog is how many streams may be opened without an answer.
	backlog = 256
	// smallBytes and less are gathered, so that a window of tiny frames costs no
	// more than one of large ones.
	smallBytes = 512
	// farewell is how long the reason of an end may take to leave.
	farewell = 100 * time.Millisecond
	// freshRTT is how old a round trip may be to judge by.
	freshRTT = 30 * time.Second
)

type header [headerBytes]byte

func newHeader(kind byte, flags uint16, stream, length uint32) (h header) {
	h[1] = kind
	binary.BigEndian.PutUint16(h[2:], flags)
	binary.BigEndian.PutUint32(h[4:], stream)
	binary.BigEndian.PutUint32(h[8:], length)
	return h
}

func (h *header) kind() byte     { return h[1] }
func (h *header) flags() uint16  { return binary.BigEndian.Uint16(h[2:]) }
func (h *header) stream() uint32 { return binary.BigEndian.Uint32(h[4:]) }
func (h *header) length() uint32 { return binary.BigEndian.Uint32(h[8:]) }
