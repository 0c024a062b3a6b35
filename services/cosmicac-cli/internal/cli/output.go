package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"
	"unicode"

	"github.com/goccy/go-yaml"
	"golang.org/x/text/width"
)

// print writes v in the form the user chose; table is called for tables.
func (e *environment) print(v any, table func(t *tableWriter)) error {
	switch e.output {
	case "json":
		enc := json.NewEncoder(e.out)
		enc.SetIndent("", "  ")
		return enc.Encode(v)
	case "yaml":
		// Through JSON, so that both forms have the same names.
		raw, err := json.Marshal(v)
		if err != nil {
			return err
		}
		y, err := yaml.JSONToYAML(raw)
		if err != nil {
			return err
		}
		_, err = e.out.Write(y)
		return err
	}
	t := &tableWriter{}
	table(t)
	return t.flush(e.out)
}

// tableWriter lines cells up by how wide a terminal draws them.
type tableWriter struct{ rows [][]string }

// row adds one line; every cell is made safe to print.
func (t *tableWriter) row(cells ...any) {
	row := make([]string, len(cells))
	for i, c := range cells {
		row[i] = shortened(printable(fmt.Sprint(c)))
	}
	t.rows = append(t.rows, row)
}

// shortened keeps a table readable; the other output forms have the whole text.
func shortened(s string) string {
	const most = 240
	if runes := []rune(s); len(runes) > most {
		return string(runes[:most]) + "…"
	}
	return s
}

func (t *tableWriter) flush(w io.Writer) error {
	var widths []int
	for _, row := range t.rows {
		// The last cell of a row is not padded, so it sets no width.
		for i := 0; i < len(row)-1; i++ {
			if i == len(widths) {
				widths = append(widths, 0)
			}
			widths[i] = max(widths[i], columns(row[i]))
		}
	}
	var b strings.Builder
	for _, row := range t.rows {
		for i, cell := range row {
			b.WriteString(cell)
			if i < len(row)-1 {
				b.WriteString(strings.Repeat(" ", widths[i]-columns(cell)+2))
			}
		}
		b.WriteByte('\n')
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// columns is how many cells of a terminal a text takes: wide characters two,
// marks that combine with their neighbour none.
func columns(s string) int {
	n := 0
	for _, r := range s {
		switch {
		case unicode.In(r, unicode.Mn, unicode.Me):
		case width.LookupRune(r).Kind() == width.EastAsianWide, width.LookupRune(r).Kind() == width.EastAsianFullwidth:
			n += 2
		default:
			n++
		}
	}
	return n
}

// printable replaces what could move the cursor or break a line; users' names
// and clusters' messages go through it.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r == '\t' || r == '\n' || r == '\r':
			return ' '
		case unicode.IsControl(r), unicode.Is(unicode.Cf, r), r == unicode.ReplacementChar:
			return '?'
		}
		return r
	}, s)
}

func age(t time.Time, now time.Time) string {
	if t.IsZero() {
		return "-"
	}
	d := now.Sub(t)
	switch {
	case d < 0:
		return "0s"
	case d < 2*time.Minute:
		return fmt.Sprintf("%ds", int(d.Seconds()))
	case d < 2*time.Hour:
		return fmt.Sprintf("%dm", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh", int(d.Hours()))
	}
	return fmt.Sprintf("%dd", int(d.Hours()/24))
}

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}
