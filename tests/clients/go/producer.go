// A producer in Go: redigo and msgpack. REDIS_URL is the address of Redis.
package main

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"log"
	"os"
	"time"

	"github.com/gomodule/redigo/redis"
	"github.com/vmihailenco/msgpack/v5"
)

// An Envelope is a result. Body is JSON in a JSON envelope, else bytes of type ContentType.
type Envelope struct {
	CorrelationID string          `json:"correlation_id" msgpack:"correlation_id"`
	Status        string          `json:"status" msgpack:"status"`
	ContentType   string          `json:"content_type,omitempty" msgpack:"content_type"`
	Body          json.RawMessage `json:"body,omitempty" msgpack:"body"`
	Detail        string          `json:"detail,omitempty" msgpack:"detail"`
	Final         bool            `json:"final" msgpack:"final"`
	BatchSize     int             `json:"batch_size" msgpack:"batch_size"`
	QueueUS       int64           `json:"queue_us" msgpack:"queue_us"`
	ComputeUS     int64           `json:"compute_us" msgpack:"compute_us"`
}

// A Tensor's Data is little-endian and row-major.
type Tensor struct {
	Datatype string `msgpack:"datatype"`
	Shape    []int  `msgpack:"shape"`
	Data     []byte `msgpack:"data"`
}

var conn redis.Conn

func main() {
	conn = must(redis.DialURL(os.Getenv("REDIS_URL")))
	defer conn.Close()

	// 1. One request. Its correlation ID is the entry ID, which XADD returns.
	id := send("square", "body", 7)
	report("json", facts{"id": id, "envelope": parsed(result("square", id))})

	// 2. A tensor, in and out.
	var data bytes.Buffer
	check(binary.Write(&data, binary.LittleEndian, []int16{1, 2, 3, 4, 5, 6}))
	matrix := must(msgpack.Marshal(Tensor{"INT16", []int{2, 3}, data.Bytes()}))
	id = send("transpose", "content_type", "application/msgpack", "body", matrix)
	var envelope Envelope
	var tensor Tensor
	check(msgpack.Unmarshal(result("transpose", id), &envelope))
	check(msgpack.Unmarshal(envelope.Body, &tensor))
	values := make([]int16, len(tensor.Data)/2)
	check(binary.Read(bytes.NewReader(tensor.Data), binary.LittleEndian, values))
	report("tensor", facts{
		"id": id, "sent": hex.EncodeToString(matrix), "status": envelope.Status,
		"datatype": tensor.Datatype, "shape": tensor.Shape, "values": values,
	})

	// 3. Two hundred requests in flight, and one stream of replies. Send does not wait; Do waits for all replies.
	name := fmt.Sprintf("go-%d-%d", os.Getpid(), time.Now().UnixNano())
	for n := 0; n < 200; n++ {
		check(conn.Send("XADD", "carpool:{square}:requests", "*",
			"reply_to", name, "correlation_id", fmt.Sprintf("%s:%d", name, n), "body", n))
	}
	must(conn.Do(""))
	answers := map[string]json.RawMessage{}
	for last := "0"; len(answers) < 200; {
		streams := must(redis.Values(conn.Do("XREAD", "COUNT", 64, "BLOCK", 10_000,
			"STREAMS", "carpool:{square}:replies:"+name, last)))
		for _, entry := range streams[0].([]any)[1].([]any) {
			var fields [][]byte // names and values, alternating
			must(redis.Scan(entry.([]any), &last, &fields))
			var envelopes []Envelope
			check(msgpack.Unmarshal(fields[1], &envelopes))
			for _, one := range envelopes {
				answers[one.CorrelationID] = one.Body
			}
		}
	}
	report("stream", facts{"reply_to": name, "answers": answers})

	// 4. A request that expires while it waits.
	id = send("away", "expiration", 50, "body", 1)
	report("expiration", facts{"id": id, "envelope": parsed(result("away", id))})

	// 5. An invalid request.
	id = send("square", "priority", 11, "body", 7)
	report("invalid", facts{"id": id, "envelope": parsed(result("square", id))})

	// 6. Two withdrawn requests: one by its entry, without a result; one by its correlation ID, with a result.
	removed := must(redis.Int(conn.Do("XDEL", "carpool:{away}:requests", send("away", "body", 1))))
	id = send("away", "body", 1)
	send("away", "withdraw", id)
	report("withdrawal", facts{"removed": removed, "id": id, "envelope": parsed(result("away", id))})
}

func send(model string, fields ...any) string {
	args := redis.Args{"carpool:{" + model + "}:requests", "*"}.Add(fields...)
	return must(redis.String(conn.Do("XADD", args...)))
}

func result(model, id string) []byte {
	return must(redis.ByteSlices(conn.Do("BLPOP", "carpool:{"+model+"}:result:"+id, 10)))[1]
}

func parsed(result []byte) (envelope Envelope) {
	check(json.Unmarshal(result, &envelope))
	return
}

type facts map[string]any

func report(step string, about facts) {
	about["step"] = step
	check(json.NewEncoder(os.Stdout).Encode(about))
}

func must[T any](value T, err error) T {
	check(err)
	return value
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
