module github.com/cosmicac/cosmicac/proto

go 1.26.7

require (
	google.golang.org/grpc v1.85.0
	google.golang.org/protobuf v1.36.12
)
