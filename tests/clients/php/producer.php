<?php
// A producer in PHP: the extensions redis and msgpack. REDIS_URL is the address of Redis.
declare(strict_types=1);

$url = parse_url(getenv('REDIS_URL'));
$redis = new Redis();
$redis->connect($url['host'], $url['port']);
if (isset($url['pass'])) {
    $redis->auth([rawurldecode($url['user']), rawurldecode($url['pass'])]);
}

$send = fn(string $model, array $fields) => $redis->xAdd("carpool:{{$model}}:requests", '*', $fields);
$result = fn(string $model, string $id) => $redis->blPop(["carpool:{{$model}}:result:$id"], 10)[1];
$print = function (string $step, array $facts): void {
    echo json_encode(['step' => $step, ...$facts]), "\n";
};

// 1. One request. Its correlation ID is the entry ID, which XADD returns.
$id = $send('square', ['body' => '7']);
$print('json', ['id' => $id, 'envelope' => json_decode($result('square', $id))]);

// 2. A tensor, in and out. msgpack_pack packs strings as text; bytes need the prefix c4 and their length.
$data = pack('v*', 1, 2, 3, 4, 5, 6);
$matrix = "\x83" . msgpack_pack('datatype') . msgpack_pack('INT16') . msgpack_pack('shape') . msgpack_pack([2, 3])
    . msgpack_pack('data') . "\xc4" . chr(strlen($data)) . $data;
$id = $send('transpose', ['content_type' => 'application/msgpack', 'body' => $matrix]);
$envelope = msgpack_unpack($result('transpose', $id));
$tensor = msgpack_unpack($envelope['body']);
$print('tensor', [
    'id' => $id,
    'sent' => bin2hex($matrix),
    'status' => $envelope['status'],
    'datatype' => $tensor['datatype'],
    'shape' => $tensor['shape'],
    'values' => array_values(unpack('v*', $tensor['data'])),
]);

// 3. Two hundred requests in flight, and one stream of replies.
$name = 'php-' . bin2hex(random_bytes(8));
$pipeline = $redis->pipeline();
for ($n = 0; $n < 200; $n++) {
    $request = ['reply_to' => $name, 'correlation_id' => "$name:$n", 'body' => $n];
    $pipeline->xAdd('carpool:{square}:requests', '*', $request);
}
$pipeline->exec();
$replies = "carpool:{square}:replies:$name";
$answers = [];
$last = '0';
while (count($answers) < 200) {
    foreach ($redis->xRead([$replies => $last], 64, 10000)[$replies] as $last => $entry) {
        foreach (msgpack_unpack($entry['results']) as $one) {
            $answers[$one['correlation_id']] = json_decode($one['body']);
        }
    }
}
$print('stream', ['reply_to' => $name, 'answers' => $answers]);

// 4. A request that expires while it waits.
$id = $send('away', ['expiration' => '50', 'body' => '1']);
$print('expiration', ['id' => $id, 'envelope' => json_decode($result('away', $id))]);

// 5. An invalid request.
$id = $send('square', ['priority' => '11', 'body' => '7']);
$print('invalid', ['id' => $id, 'envelope' => json_decode($result('square', $id))]);

// 6. Two withdrawn requests: one by its entry, without a result; one by its correlation ID, with a result.
$removed = $redis->xDel('carpool:{away}:requests', [$send('away', ['body' => '1'])]);
$id = $send('away', ['body' => '1']);
$send('away', ['withdraw' => $id]);
$print('withdrawal', ['removed' => $removed, 'id' => $id, 'envelope' => json_decode($result('away', $id))]);
