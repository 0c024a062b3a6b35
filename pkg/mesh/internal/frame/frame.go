// Package frame is the form of the admit dialogue on the wire: a varint length and
// one protobuf message. It reads what strangers send, so every length is bounded
// before anything is allocated. It knows nothing of what the messages mean.
package frame

import (
	"encoding/binary"
	"io"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"google.golang.org/protobuf/proto"
)

const (
	// Guest bounds a frame from a peer that nothing is known of.
	Guest = 16 << 10
	// Member bounds a frame that may carry a roster.
	Member = 1 << 20
)

// Write writes a varint length and the message, in one write.
func Write(w io.Writer, m proto.Message) error {
	body, err := proto.Marshal(m)
	if err != nil {
		return fault.Wrap(fault.Internal, err, "encode an admit frame")
	}
	if len(body) > Member {
		return fault.New(fault.TooLarge, "encode an admit frame: %d bytes, at most %d", len(body), Member)
	}
	frame := binary.AppendUvarint(make([]byte, 0, len(body)+binary.MaxVarintLen32), uint64(len(body)))
	_, err = w.Write(append(frame, body...))
	return err
}

// Read reads one frame of at most limit bytes. It reads not one byte past
// the frame, and allocates no more than has arrived of a long one.
func Read(r io.Reader, limit int, m proto.Message) error {
	size, err := binary.ReadUvarint(byteReader{r})
	if err != nil {
		return fault.Wrap(fault.Invalid, err, "read an admit frame's length")
	}
	if size > uint64(limit) {
		return fault.New(fault.TooLarge, "read an admit frame: %d bytes, at most %d", size, limit)
	}
	body, err := io.ReadAll(io.LimitReader(r, int64(size)))
	if err != nil {
		return fault.Wrap(fault.Invalid, err, "read an admit frame")
	}
	if uint64(len(body)) != size {
		return fault.Wrap(fault.Invalid, io.ErrUnexpectedEOF, "read an admit frame: %d of %d bytes", len(body), size)
	}
	if err := proto.Unmarshal(body, m); err != nil {
		return fault.Wrap(fault.Invalid, err, "decode an admit frame")
	}
	return nil
}

// byteReader reads single bytes of a reader without buffering.
type byteReader struct{ r io.Reader }

func (b byteReader) ReadByte() (byte, error) {
	var one [1]byte
	_, err := io.ReadFull(b.r, one[:])
	return one[0], err
}
