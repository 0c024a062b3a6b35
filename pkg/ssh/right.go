package ssh

// Right is one thing that a grant allows. The list is closed.
type Right string

// The rights. A shell is a terminal; exec is a command and its pipes.
const (
	RightShell   Right = "shell"
	RightExec    Right = "exec"
	RightFiles   Right = "files"
	RightForward Right = "forward"
)

// Rights lists all rights.
func Rights() []Right { return []Right{RightShell, RightExec, RightFiles, RightForward} }

// Access is what one connection may do and whom it belongs to.
type Access struct {
	// Rights as the grant states them; unknown ones give nothing.
	Rights []string
	// Client is the client's key and User the id that the grant was made for.
	// Both are for the log only.
	Client, User string
}

func (a Access) has(r Right) bool {
	for _, have := range a.Rights {
		if have == string(r) {
			return true
		}
	}
	return false
}
