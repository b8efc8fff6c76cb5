package server

func ownVM(string) {}
