#!/bin/bash
reward=0
[ "$(cat result.txt)" = done ] && reward=1
echo $reward > /logs/verifier/reward.txt
