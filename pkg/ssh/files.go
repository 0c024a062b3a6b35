package ssh

import (
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/pkg/sftp"
)

// FilesCommand is the argument by which a binary that holds this server is
// started again, under the login's account, to speak SFTP. Its main must pass
// it to ServeFiles before anything else.
const FilesCommand = "sftp-server"

// ServeFiles speaks SFTP on the process's standard input and output, as the
// user that the process runs as and with all that this user may touch. It
// returns the exit code.
func ServeFiles() int {
	home, err := os.UserHomeDir()
	if err != nil {
		home = "/"
	}
	server, err := sftp.NewServer(standard{}, sftp.WithServerWorkingDirectory(home))
	if err != nil {
		fmt.Fprintln(os.Stderr, "cosmicac: start sftp:", err)
		return 1
	}
	defer server.Close()
	if err := server.Serve(); err != nil && !errors.Is(err, io.EOF) {
		fmt.Fprintln(os.Stderr, "cosmicac: sftp:", err)
		return 1
	}
	return 0
}

// standard is the process's own input and output as one stream.
type standard struct{}

func (standard) Read(p []byte) (int, error)  { return os.Stdin.Read(p) }
func (standard) Write(p []byte) (int, error) { return os.Stdout.Write(p) }
func (standard) Close() error                { return os.Stdout.Close() }
