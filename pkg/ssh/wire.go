package ssh

// Payloads of RFC 4254, in the order that golang.org/x/crypto/ssh marshals.

type ptyRequest struct {
	Term                   string
	Columns, Rows          uint32
	WidthPixels, HeightPix uint32
	Modes                  string
}

type windowChange struct {
	Columns, Rows          uint32
	WidthPixels, HeightPix uint32
}

type envRequest struct{ Name, Value string }

type execRequest struct{ Command string }

type subsystemRequest struct{ Name string }

type signalRequest struct{ Signal string }

type exitStatus struct{ Status uint32 }

type exitSignal struct {
	Signal     string
	CoreDumped bool
	Message    string
	Language   string
}

type directTCP struct {
	Host       string
	Port       uint32
	Origin     string
	OriginPort uint32
}

const keepAliveRequest = "keepalive@openssh.com"
