package cli

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
)

// ParseMemMB reads an amount of memory and gives it in MiB: "512" (MiB),
// "512m", "512MiB", "2g", "2GiB", "1.5g". Units are powers of 1024, in any
// case, and the result must be a whole number of MiB.
func ParseMemMB(s string) (int, error) {
	number := strings.TrimRight(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
	unit := strings.ToLower(s[len(number):])
	factor, ok := map[string]float64{
		"": 1, "m": 1, "mb": 1, "mib": 1,
		"k": 1.0 / 1024, "kb": 1.0 / 1024, "kib": 1.0 / 1024,
		"g": 1024, "gb": 1024, "gib": 1024,
		"t": 1 << 20, "tb": 1 << 20, "tib": 1 << 20,
	}[unit]
	value, err := strconv.ParseFloat(strings.TrimSpace(number), 64)
	if !ok || err != nil || strings.ContainsAny(number, "xXpP_") {
		return 0, errors.New("not an amount of memory; write 512m or 2g")
	}
	mb := value * factor
	if mb < 0 || mb != math.Trunc(mb) || mb > math.MaxInt32 {
		return 0, errors.New("no sensible amount of memory; write 512m or 2g")
	}
	return int(mb), nil
}

// FormatMB shows an amount of MiB the way people say it: 512 MiB, 2 GiB,
// 1.5 GiB.
func FormatMB(mb int64) string {
	if mb < 1024 {
		return fmt.Sprintf("%d MiB", mb)
	}
	return strings.TrimSuffix(fmt.Sprintf("%.1f", float64(mb)/1024), ".0") + " GiB"
}

// FormatBytes shows an amount of bytes: 17 B, 3.2 KiB, 1.5 GiB.
func FormatBytes(n int64) string {
	if n < 1024 {
		return fmt.Sprintf("%d B", n)
	}
	value, unit := float64(n), 0
	for value >= 1024 && unit < 4 {
		value, unit = value/1024, unit+1
	}
	return strings.TrimSuffix(fmt.Sprintf("%.1f", value), ".0") + " " + []string{"B", "KiB", "MiB", "GiB", "TiB"}[unit]
}
