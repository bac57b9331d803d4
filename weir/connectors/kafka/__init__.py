"""Kafka as a source and as a sink.

source       START HERE for reading: the definition, which parts come next, what is lost
cluster      topics, and the offsets that their partitions have
reading      the rows of one part: messages between two offsets, decoded
sink         START HERE for writing: the definition, and the transaction that publishes a checkpoint
encoding     rows to messages
headers      which checkpoint a message belongs to
avro         single values of Avro, as messages have them
client       connections and how their errors read

The definitions can be imported without the client library.
"""
