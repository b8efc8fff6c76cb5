package cli

import (
	"fmt"
	"io"
	"strings"
	"unicode/utf8"
)

// Table is rows under a line of headings, columns lined up. The zero Table
// is empty and ready.
type Table struct {
	// Right names the columns (from 0) whose cells end at the right.
	Right []int

	rows [][]string
}

// Row adds a row; the first is the headings.
func (t *Table) Row(cells ...string) {
	t.rows = append(t.rows, cells)
}

// Write writes the table. The last column is never padded, so that no line
// ends in blanks.
func (t *Table) Write(w io.Writer) error {
	var widths []int
	for _, row := range t.rows {
		for i, cell := range row {
			if i == len(widths) {
				widths = append(widths, 0)
			}
			widths[i] = max(widths[i], width(cell))
		}
	}
	var b strings.Builder
	for _, row := range t.rows {
		var line strings.Builder
		for i, cell := range row {
			pad := strings.Repeat(" ", widths[i]-width(cell))
			if t.right(i) {
				line.WriteString(pad + cell)
			} else {
				line.WriteString(cell + pad)
			}
			line.WriteString("  ")
		}
		b.WriteString(strings.TrimRight(line.String(), " ") + "\n")
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func (t *Table) right(column int) bool {
	for _, c := range t.Right {
		if c == column {
			return true
		}
	}
	return false
}

// width counts the columns a cell takes on a terminal: its characters without
// the escape sequences that Style writes.
func width(cell string) int {
	n := utf8.RuneCountInString(cell)
	for rest := cell; ; {
		_, after, ok := strings.Cut(rest, "\x1b[")
		if !ok {
			return n
		}
		code, text, _ := strings.Cut(after, "m")
		n -= len("\x1b[") + len(code) + len("m")
		rest = text
	}
}

// Count says "1 VM" or "3 VMs".
func Count(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}
