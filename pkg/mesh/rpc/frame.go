package rpc

import (
	"encoding/binary"
	"io"
	"sync"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"google.golang.org/grpc/metadata"
)

// The stream of calls carries frames, many calls at a time:
//
//	size    4 bytes, big endian: bytes that follow
//	kind    1 byte
//	id      uvarint: the caller's choice, above 0 and of no other call that runs
//	request:  timeout uvarint, microseconds, 0 for none
//	          method  string
//	          header  pairs
//	          message, to the end
//	answer:   flags   1 byte
//	          header  pairs, if flagged; in the last frame
//	          trailer pairs, if flagged; in the last frame
//	          message, or a google.rpc.Status if flagged, to the end
//	cancel:   nothing more
//
// A string is a uvarint length and bytes; pairs are a uvarint count and two
// strings each. An answer longer than a piece comes in several frames, in order,
// with those of other calls in between; its message is what they hold together.
const (
	kindRequest = 1
	kindAnswer  = 2
	kindCancel  = 3

	flagMore    = 1 // further frames of this answer follow
	flagFailed  = 2 // a status instead of a message
	flagHeader  = 4
	flagTrailer = 8

	// FastBytes is the largest request that the stream of calls takes: 64 KiB of
	// payload and what stands around it.
	FastBytes = 65 << 10
	// pieceBytes is the most that one frame of an answer carries.
	pieceBytes = 64 << 10
	// maxPairsBytes bounds headers, and trailers, of one call, as gRPC's own limit here.
	maxPairsBytes = 16 << 10
	maxPairs      = 128
	maxMethod     = 512
	// maxFrameBytes bounds a frame: a piece, both pairs and the rest.
	maxFrameBytes = FastBytes + 2*maxPairsBytes + 4<<10
)

// frame is one frame as read. Its slices point into buffer, or into the inlet's until
// that is read from again; keep makes them stay.
type frame struct {
	kind    byte
	id      uint64
	timeout uint64 // microseconds
	method  []byte
	flags   byte
	header  metadata.MD
	trailer metadata.MD
	body    []byte
	size    int     // all that it holds in memory
	buffer  *buffer // nil if it is the inlet's
}

// keep makes body stay; method does not.
func (f *frame) keep() {
	if f.buffer == nil {
		f.buffer = newBuffer(len(f.body))
		f.buffer.bytes = append(f.buffer.bytes, f.body...)
		f.body = f.buffer.bytes
	}
}

func (f *frame) free() {
	if f.buffer != nil {
		f.buffer.free()
		f.buffer, f.body = nil, nil
	}
}

func malformed(what string) error {
	return fault.New(fault.Invalid, "read a frame of calls: %s", what)
}

// inlet reads a stream of calls. While it waits it holds a small buffer, since thousands
// of agents hold a link each for a while after every call. Once that was filled it has a
// large one, until less comes.
type inlet struct {
	r      io.Reader
	small  []byte
	large  *buffer // nil while little comes
	unread []byte  // part of one of them
	much   bool    // the last read brought at least a small buffer full
}

const (
	smallRead = 4 << 10
	largeRead = 32 << 10
)

func newInlet(r io.Reader) *inlet { return &inlet{r: r, small: make([]byte, smallRead)} }

// head waits for the size of a frame.
func (in *inlet) head() error {
	if len(in.unread) >= 4 {
		return nil
	}
	if in.large != nil && !in.much {
		in.unread = in.small[:copy(in.small, in.unread)]
		in.large.free()
		in.large = nil
	}
	if in.large == nil && in.much {
		in.large = newBuffer(largeRead)
	}
	b := in.small
	if in.large != nil {
		b = in.large.bytes[:largeRead]
	}
	n := copy(b, in.unread)
	for n < 4 {
		k, err := in.r.Read(b[n:])
		n += k
		in.unread, in.much = b[:n], k >= smallRead
		if err != nil && n < 4 {
			if n > 0 && err == io.EOF {
				err = io.ErrUnexpectedEOF
			}
			return err
		}
	}
	return nil
}

// leave leaves the memory that was read into to a frame that is still in it, and reads
// on in other.
func (in *inlet) leave() {
	if in.large != nil {
		in.large = newBuffer(largeRead)
		in.unread = append(in.large.bytes, in.unread...)
	} else {
		in.small = make([]byte, smallRead)
		in.unread = in.small[:copy(in.small, in.unread)]
	}
}

// whole tells whether a whole frame has come: to read it will not block.
func (in *inlet) whole() bool {
	return len(in.unread) >= 4 && uint64(len(in.unread)) >= 4+uint64(binary.BigEndian.Uint32(in.unread))
}

// readFrame reads one frame, which the caller frees. It allocates nothing before the
// size is known to be in bounds.
func (in *inlet) readFrame(f *frame) error {
	if err := in.head(); err != nil {
		return err
	}
	size := binary.BigEndian.Uint32(in.unread)
	if size < 2 || size > maxFrameBytes {
		return fault.New(fault.TooLarge, "read a frame of calls: %d bytes, want 2 to %d", size, maxFrameBytes)
	}
	if in.whole() {
		b := in.unread[4 : 4+size]
		in.unread = in.unread[4+size:]
		return parseFrame(b, f)
	}
	b := newBuffer(int(size))
	b.bytes = b.bytes[:size]
	n := copy(b.bytes, in.unread[4:])
	in.unread = in.unread[4+n:]
	in.much = in.much && n == len(b.bytes) // one that is large by itself says nothing of what follows
	if _, err := io.ReadFull(in.r, b.bytes[n:]); err != nil {
		b.free()
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		return err
	}
	if err := parseFrame(b.bytes, f); err != nil {
		b.free()
		return err
	}
	f.buffer = b
	return nil
}

// parseFrame reads what follows the size.
func parseFrame(b []byte, f *frame) (err error) {
	*f = frame{size: len(b)}
	if len(b) == 0 {
		return malformed("it is empty")
	}
	f.kind, b = b[0], b[1:]
	var ok bool
	if f.id, b, ok = takeUvarint(b); !ok || f.id == 0 {
		return malformed("bad id")
	}
	switch f.kind {
	case kindRequest:
		if f.timeout, b, ok = takeUvarint(b); !ok {
			return malformed("bad timeout")
		}
		if f.method, b, ok = takeString(b); !ok || len(f.method) > maxMethod {
			return malformed("bad method")
		}
		if f.header, b, err = takePairs(b); err != nil {
			return err
		}
		if len(b) > FastBytes {
			return malformed("request too long")
		}
		f.body = b
	case kindAnswer:
		if len(b) == 0 {
			return malformed("no flags")
		}
		f.flags, b = b[0], b[1:]
		if f.flags&flagHeader != 0 {
			if f.header, b, err = takePairs(b); err != nil {
				return err
			}
		}
		if f.flags&flagTrailer != 0 {
			if f.trailer, b, err = takePairs(b); err != nil {
				return err
			}
		}
		f.body = b
	case kindCancel:
		if len(b) > 0 {
			return malformed("a cancel with a body")
		}
	default:
		return malformed("unknown kind")
	}
	return nil
}

func takeUvarint(b []byte) (uint64, []byte, bool) {
	v, n := binary.Uvarint(b)
	if n <= 0 {
		return 0, nil, false
	}
	return v, b[n:], true
}

func takeString(b []byte) ([]byte, []byte, bool) {
	n, b, ok := takeUvarint(b)
	if !ok || n > uint64(len(b)) {
		return nil, nil, false
	}
	return b[:n], b[n:], true
}

func takePairs(b []byte) (metadata.MD, []byte, error) {
	count, rest, ok := takeUvarint(b)
	if !ok || count > maxPairs {
		return nil, nil, malformed("bad count of pairs")
	}
	if count == 0 {
		return nil, rest, nil
	}
	md := make(metadata.MD, count)
	for range count {
		var k, v []byte
		if k, rest, ok = takeString(rest); !ok {
			return nil, nil, malformed("bad key of a pair")
		}
		if v, rest, ok = takeString(rest); !ok {
			return nil, nil, malformed("bad value of a pair")
		}
		if len(b)-len(rest) > maxPairsBytes {
			return nil, nil, malformed("pairs too long")
		}
		md.Append(string(k), string(v))
	}
	return md, rest, nil
}

// beginFrame leaves room for the size; endFrame fills it in. Between them the
// frame is appended.
func beginFrame(b []byte, kind byte, id uint64) []byte {
	b = append(b, 0, 0, 0, 0, kind)
	return binary.AppendUvarint(b, id)
}

func endFrame(b []byte, start int) []byte {
	binary.BigEndian.PutUint32(b[start:], uint32(len(b)-start-4))
	return b
}

func appendString(b []byte, s string) []byte {
	return append(binary.AppendUvarint(b, uint64(len(s))), s...)
}

func appendPairs(b []byte, md metadata.MD) []byte {
	count := 0
	for _, values := range md {
		count += len(values)
	}
	b = binary.AppendUvarint(b, uint64(count))
	for k, values := range md {
		for _, v := range values {
			b = appendString(appendString(b, k), v)
		}
	}
	return b
}

// pairsFit tells whether md may cross.
func pairsFit(md metadata.MD) bool {
	count, size := 0, 0
	for k, values := range md {
		for _, v := range values {
			count++
			size += len(k) + len(v) + 8
		}
	}
	return count <= maxPairs && size <= maxPairsBytes
}

// buffer is a pooled piece of memory. Most calls are small, so there are two sizes.
type buffer struct{ bytes []byte }

const smallBuffer = 2 << 10

var (
	smallBuffers = sync.Pool{New: func() any { return &buffer{make([]byte, 0, smallBuffer)} }}
	largeBuffers = sync.Pool{New: func() any { return &buffer{make([]byte, 0, maxFrameBytes+8)} }}
)

// newBuffer returns an empty buffer with room for n bytes.
func newBuffer(n int) *buffer {
	switch {
	case n <= smallBuffer:
		return smallBuffers.Get().(*buffer)
	case n <= maxFrameBytes+8:
		return largeBuffers.Get().(*buffer)
	}
	return &buffer{make([]byte, 0, n)}
}

func (b *buffer) free() {
	b.bytes = b.bytes[:0]
	switch c := cap(b.bytes); {
	case c == smallBuffer:
		smallBuffers.Put(b)
	case c >= maxFrameBytes && c <= 4*maxFrameBytes:
		largeBuffers.Put(b)
	}
}
