#!/usr/bin/env perl
# A producer in Perl: Redis and Data::MessagePack. REDIS_URL is the address of Redis.
use v5.30;
use warnings;
use Data::MessagePack;
use JSON::PP;
use Redis;

my ($user, $password, $server) = $ENV{REDIS_URL} =~ m{^redis://(?:(.*):(.*)@)?([^/]+)} or die "no REDIS_URL\n";
my $redis = Redis->new(server => $server, username => $user, password => $password);
my $msgpack = Data::MessagePack->new;
my $json = JSON::PP->new->allow_nonref;

sub send_to { my ($model, @fields) = @_; return $redis->xadd("carpool:{$model}:requests", '*', @fields) }
sub result { my ($model, $id) = @_; return $redis->blpop("carpool:{$model}:result:$id", 10)->[1] }
sub report { my ($step, %facts) = @_; say $json->encode({ step => $step, %facts }) }

# 1. One request. Its correlation ID is the entry ID, which XADD returns.
my $id = send_to('square', body => 7);
report(json => id => $id, envelope => $json->decode(result('square', $id)));

# 2. A tensor, in and out. ->utf8 packs strings as text; without it they are packed as bytes. A tensor needs both.
my $text = Data::MessagePack->new->utf8;
my @shape = ('datatype', 'INT16', 'shape', [2, 3]);
my $matrix = join '', "\x83", map({ $text->pack($_) } @shape, 'data'), $msgpack->pack(pack 's<*', 1 .. 6);
$id = send_to('transpose', content_type => 'application/msgpack', body => $matrix);
my $envelope = $msgpack->unpack(result('transpose', $id));
my $tensor = $msgpack->unpack($envelope->{body});
report(
    tensor => id => $id,
    sent => unpack('H*', $matrix),
    status => $envelope->{status},
    datatype => $tensor->{datatype},
    shape => $tensor->{shape},
    values => [unpack 's<*', $tensor->{data}],
);

# 3. Two hundred requests in flight, and one stream of replies. A command with a callback does not wait.
my $name = "perl-$$-" . time;
my $replies = "carpool:{square}:replies:$name";
for my $n (0 .. 199) {
    my @fields = (reply_to => $name, correlation_id => "$name:$n", body => $n);
    $redis->xadd('carpool:{square}:requests', '*', @fields, sub { my ($id, $error) = @_; die $error if $error });
}
$redis->wait_all_responses;
my %answers;
my $last = 0;
while (keys %answers < 200) {
    my $streams = $redis->xread(COUNT => 64, BLOCK => 10_000, STREAMS => $replies, $last);
    for my $entry (@{ $streams->[0][1] }) {
        ($last, my $fields) = @$entry;
        my %fields = @$fields;
        $answers{ $_->{correlation_id} } = $json->decode($_->{body}) for @{ $msgpack->unpack($fields{results}) };
    }
}
report(stream => reply_to => $name, answers => \%answers);

# 4. A request that expires while it waits.
$id = send_to('away', expiration => 50, body => 1);
report(expiration => id => $id, envelope => $json->decode(result('away', $id)));

# 5. An invalid request.
$id = send_to('square', priority => 11, body => 7);
report(invalid => id => $id, envelope => $json->decode(result('square', $id)));

# 6. Two withdrawn requests: one by its entry, without a result; one by its correlation ID, with a result.
my $removed = $redis->xdel('carpool:{away}:requests', send_to('away', body => 1));
$id = send_to('away', body => 1);
send_to('away', withdraw => $id);
report(withdrawal => removed => $removed + 0, id => $id, envelope => $json->decode(result('away', $id)));
