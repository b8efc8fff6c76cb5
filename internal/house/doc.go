// Package house holds no program: its test keeps the rules of the house, who
// may import whom. The rules are the tables in rules.go; docs and reviews
// point here instead of repeating them.
package house
