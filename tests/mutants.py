"""`make mutants`: break the code on purpose, one line at a time, and see that a named test notices.

Each mutant is applied to a copy of the tree; the named tests must pass there before it and fail after it. Exit 1 if one
survives, or if the line that it changes is no longer there.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Mutant:
    """One sabotage. test: pytest's id of what must turn red."""

    name: str
    file: str
    old: str
    new: str
    test: str


MUTANTS = [
    Mutant(
        "refresh the handle between reading the generation and claiming the next",
        "state_ops/delta_log.py",
        "    handle.create_write_transaction(\n",
        "    handle.update_incremental()\n    handle.create_write_transaction(\n",
        "tests/state_ops/test_registry.py::test_of_two_takers_at_once_one_wins",
    ),
    Mutant(
        "put an entry over the one that is there",
        "state_ops/log_entries.py",
        "    if not version.storage.create(path, entry) and version.storage.read_bytes(path) != entry:\n",
        "    version.storage.put_bytes(path, entry)\n    if not entry:\n",
        "tests/state_ops/test_registry.py::test_a_zombie_is_fenced_although_it_was_overtaken_in_the_middle_of_its_commit",
    ),
    Mutant(
        "commit without an app id",
        "state_ops/delta_log.py",
        "app_transactions=[Transaction(app_id, version)], ",
        "",
        "tests/state_ops/test_registry.py::test_every_take_over_is_a_generation_higher",
    ),
    Mutant(
        "judge lateness by the epoch's own watermark",
        "pipelines/runtime/keyed_stage.py",
        "                task.progress,\n",
        "                type(task.progress)(task.progress.now, task.progress.now, False),\n",
        "tests/runtime/test_operators.py::test_a_row_is_late_by_the_epochs_before_its_own",
    ),
    Mutant(
        "ignore the generation",
        "state_ops/delta_log.py",
        "        if owner != generation:\n",
        "        if owner is None:\n",
        "tests/state_ops/test_registry.py::test_a_zombie_commits_nothing_after_a_take_over",
    ),
    Mutant(
        "drop the parent check",
        "state_ops/registry.py",
        "check=_head_is(checkpoint.parent_id, data.path))",
        "check=None)",
        "tests/state_ops/test_registry.py::test_a_commit_is_refused_when_the_head_is_not_its_parent",
    ),
    Mutant(
        "believe a listing of another length",
        "state_ops/registry.py",
        "        if len(rows) != checkpoint.files:\n",
        "        if len(rows) > 1_000_000:\n",
        "tests/state_ops/test_registry.py::test_a_listing_of_another_length_is_damage",
    ),
    Mutant(
        "count rows of another try's listing",
        "state_ops/registry.py",
        '        rows = rows.filter(pc.equal(rows["commit_id"], checkpoint.commit_id))\n',
        "",
        "tests/state_ops/test_registry.py::test_a_listing_without_a_row_does_not_count",
    ),
    Mutant(
        "read a format of the future",
        "state_ops/registry.py",
        'if row["format_version"] > NEWEST_FORMAT:',
        'if row["format_version"] > NEWEST_FORMAT + 99:',
        "tests/state_ops/test_registry.py::test_case_23_a_row_of_a_future_format_is_refused",
    ),
    Mutant(
        "reuse by name and size",
        "state_ops/snapshot.py",
        "forked.inherited.get(file.name) == found.st_ino)",
        "file.name in forked.inherited)",
        "tests/state_ops/test_snapshot.py::test_a_file_that_is_not_the_inherited_inode_is_uploaded",
    ),
    Mutant(
        "upload everything again",
        "state_ops/snapshot.py",
        "        if not full:\n            return replace(known",
        "        if full:\n            return replace(known",
        "tests/state_ops/test_snapshot.py::test_only_new_tables_are_uploaded",
    ),
    Mutant(
        "trust local files without their manifest",
        "state_ops/snapshot.py",
        " and _read_manifest(directory) == wanted:",
        ":",
        "tests/state_ops/test_snapshot.py::test_local_files_without_their_own_manifest_are_not_used",
    ),
    Mutant(
        "restore without checking digests",
        "state_ops/snapshot.py",
        "digest=file.digest)",
        "digest=None)",
        "tests/state_ops/test_snapshot.py::test_a_damaged_object_is_named_when_local_files_are_gone",
    ),
    Mutant(
        "sweep the base away",
        "state_ops/sweep.py",
        " and owner(directory) not in bases:",
        ":",
        "tests/state_ops/test_snapshot.py::test_sweep_keeps_the_base_and_removes_older_epochs_and_lower_generations",
    ),
    Mutant(
        "leave what is pending out of a look-up",
        "state_ops/rows.py",
        "        for table in (self._pending, self._resident):\n",
        "        for table in (None, self._resident):\n",
        "tests/state_ops/test_rows.py::test_a_batch_of_many_of_the_keys_reads_them_all_and_keeps_them",
    ),
    Mutant(
        "forget the resident table's changes",
        "state_ops/rows.py",
        "                self._resident = self._resident.merged(newer, present, places)\n",
        "                self._resident.merged(newer, present, places)\n",
        "tests/state_ops/test_rows.py::test_a_batch_of_many_of_the_keys_reads_them_all_and_keeps_them",
    ),
    Mutant(
        "trust a resident table's bytes unseen",
        "state_ops/resident.py",
        '                if xxhash.xxh3_128_hexdigest(memoryview(file.read_buffer())) != note["digest"]:\n',
        '                if not note["digest"]:\n',
        "tests/state_ops/test_rows.py::test_a_resident_table_that_is_not_what_was_left_is_not_used[flip]",
    ),
    Mutant(
        "take what a sweep deleted for damage once its TTL is off",
        "state_ops/lists.py",
        "        if not here.all() and not self._swept:\n",
        "        if not here.all() and self._expiry is None:\n",
        "tests/properties/test_kinds_of_state.py::test_elements_that_a_ttl_has_swept_are_no_damage_once_it_is_off",
    ),
    Mutant(
        "let partials of long text gather without end",
        "state_ops/folding.py",
        " or size > _PARTIAL_BYTES // share\n",
        "\n",
        "tests/state_ops/test_folding.py::test_partials_are_full_by_their_number_and_by_their_size[200-4000-True]",
    ),
    Mutant(
        "hand all rows out to their windows at once",
        "pipelines/runtime/operators/windows.py",
        "_PARTIAL_ROWS * self._window.every // self._window.size)",
        "_PARTIAL_ROWS)",
        "tests/runtime/test_windows.py::test_rows_are_handed_out_to_so_many_windows_in_parts",
    ),
    Mutant(
        "use a resident table of another schema",
        "state_ops/resident.py",
        '            if note["format"] != _FORMAT or note["shape"] != shape:\n',
        '            if note["format"] != _FORMAT:\n',
        "tests/state_ops/test_rows.py::test_a_resident_table_that_is_not_what_was_left_is_not_used[other schema]",
    ),
    Mutant(
        "take the hash for the key",
        "state_ops/hashed.py",
        "        if not all(found[name].equals(asked[name].cast(found.schema[name])) for name in self.keys):\n",
        "        if False:\n",
        "tests/state_ops/test_rows.py::test_two_keys_with_one_hash_cannot_live_in_a_table",
    ),
    Mutant(
        "write rows in the order of their hashes",
        "state_ops/rows.py",
        "        return arrays, order\n",
        "        return arrays, np.arange(len(keys))\n",
        "tests/state_ops/test_rows.py::test_numbers_are_written_in_the_order_of_their_encoded_keys",
    ),
    Mutant(
        "take places in one table for those in another",
        "state_ops/rows.py",
        "        return self.at if hashes is self.hashes and table is self.table else None\n",
        "        return self.at\n",
        "tests/state_ops/test_rows.py::test_what_was_found_out_about_some_keys_is_not_taken_for_others",
    ),
    Mutant(
        "put other keys than those that were asked for in their order",
        "state_ops/rows.py",
        "        known = self._asked if self._asked is not None and self._asked.keys is keys else self._ordered(keys)\n",
        "        known = self._asked if self._asked is not None and len(self._asked.keys) == len(keys) else self._ordered(keys)\n",
        "tests/state_ops/test_rows.py::test_what_was_found_out_about_some_keys_is_not_taken_for_others",
    ),
    Mutant(
        "leave texts that begin alike as they come",
        "state_ops/rows.py",
        "            order, keys = order[exactly], [keys[index] for index in exactly]\n",
        "            pass\n",
        "tests/state_ops/test_rows.py::test_the_last_write_of_an_epoch_is_a_run_whose_keys_ascend_however_alike_they_begin",
    ),
    Mutant(
        "read past a run that is held",
        "state_ops/backends/rocksdb.py",
        "        self._release()\n        first, last = ",
        "        first, last = ",
        "tests/state_ops/test_runs.py::test_whatever_is_read_and_written_around_runs_a_dict_says_the_same",
    ),
    Mutant(
        "a file of its own for every run",
        "state_ops/backends/rocksdb.py",
        "            held, self._held = self._held, None\n            self._put(held, ())\n",
        "            held, self._held = self._held, None\n            self._ingest(held)\n",
        "tests/state_ops/test_runs.py::test_a_run_and_what_follows_it_are_one_file",
    ),
    Mutant(
        "fire windows before what is pending is written",
        "pipelines/runtime/operators/windows.py",
        "        self._rows.barrier()\n",
        "",
        "tests/runtime/test_operators.py::test_a_window_ends_before_its_end_and_fires_when_the_watermark_reaches_it",
    ),
    Mutant(
        "link what RocksDB appends to",
        "state_ops/snapshot.py",
        "    if immutable:\n        os.link(local",
        "    if file.name:\n        os.link(local",
        "tests/state_ops/test_snapshot.py::test_a_fork_links_tables_and_copies_what_rocksdb_appends_to",
    ),
    Mutant(
        "follow paths out of the root",
        "state_ops/storage.py",
        ' or ".." in pure.parts:',
        ":",
        "tests/state_ops/test_snapshot.py::test_hostile_paths_from_a_registry_are_refused",
    ),
    Mutant(
        "delete what others still reference",
        "state_ops/shared_state.py",
        " if file.kind != OUTPUT and counts[file.path] == 0}",
        " if file.kind != OUTPUT}",
        "tests/state_ops/test_retention.py::test_case_1_a_shared_file_goes_with_the_last_checkpoint_that_names_it",
    ),
    Mutant(
        "delete published rows",
        "state_ops/shared_state.py",
        " if file.kind != OUTPUT and counts[file.path] == 0}",
        " if counts[file.path] == 0}",
        "tests/state_ops/test_retention.py::test_published_output_is_never_deleted_but_channels_are",
    ),
    Mutant(
        "delete the objects before the rows",
        "state_ops/retention.py",
        "    registry.drop_listings(generation, gone)\n    registry.prove(generation)  # a successor may have dropped those listings: then they are its to deal with\n    storage.delete_files([file.path for file in delete])\n",
        "    storage.delete_files([file.path for file in delete])\n    registry.drop_listings(generation, gone)\n",
        "tests/state_ops/test_retention.py::test_rows_go_before_objects_and_checkpoints_before_their_listings",
    ),
    Mutant(
        "prune what is pinned",
        "state_ops/retention.py",
        "        found[row.id] = (*why, *(needed or {}).get(row.id, ()))\n",
        "        found[row.id] = tuple(why)\n",
        "tests/state_ops/test_retention.py::test_pinned_checkpoints_stay",
    ),
    Mutant(
        "take live attempts for orphans",
        "state_ops/retention.py",
        "parsed[0] < generation and file.path not in named",
        "file.path not in named",
        "tests/state_ops/test_retention.py::test_only_older_generations_have_orphans_and_only_state_and_channels",
    ),
    Mutant(
        "publish the same version twice",
        "pipelines/runtime/sinks/delta.py",
        "        if version is not None and version >= checkpoint.id:\n",
        "        if version is not None and version > checkpoint.id + 99:\n",
        "tests/runtime/test_delta_sink.py::test_publishing_twice_is_publishing_once",
    ),
    Mutant(
        "publish past a gap in the chain",
        "pipelines/runtime/sinks/delta.py",
        "        if version != previous:\n",
        "        if version is not None and previous is None and version < 0:\n",
        "tests/runtime/test_delta_sink.py::test_a_table_that_is_behind_the_chain_is_damage",
    ),
    Mutant(
        "name staged files unseen",
        "pipelines/runtime/sinks/delta.py",
        "        if problem:\n",
        "        if problem is True:\n",
        "tests/runtime/test_delta_sink.py::test_staged_files_are_checked_before_a_commit_names_them",
    ),
    Mutant(
        "accept acks of another generation",
        "state_ops/coordinator.py",
        "        if ack.generation != self.generation:\n",
        "        if ack.generation > self.generation + 99:\n",
        "tests/state_ops/test_coordinator.py::test_late_foreign_and_fenced_acks_change_nothing",
    ),
    Mutant(
        "let the last ack win",
        "state_ops/pending.py",
        "        if known is not None and (not uploaded or ack.handover is not None):\n",
        "        if known == ():\n",
        "tests/state_ops/test_coordinator.py::test_the_first_ack_of_a_subtask_wins_among_its_attempts",
    ),
    Mutant(
        "believe a commit that landed in a cleaned log",
        "state_ops/delta_log.py",
        "                if log_entries.still_there(before):\n",
        "                if made is not before:\n",
        "tests/state_ops/test_registry_upkeep.py::test_an_entry_put_where_one_was_cleaned_away_counts_for_nobody",
    ),
    Mutant(
        "believe a claim that is not the newest version",
        "state_ops/delta_log.py",
        "            if self.look(lambda newest: newest.number) == version + 1:\n",
        "            if version >= 0:\n",
        "tests/state_ops/test_registry_upkeep.py::test_of_two_takers_one_wins_although_the_other_puts_its_claim_long_after",
    ),
    Mutant(
        "let the registry's log grow",
        "state_ops/delta_log.py",
        "            log_upkeep.clean_up(self.storage, self.path)\n",
        "            pass\n",
        "tests/state_ops/test_registry_upkeep.py::test_the_hundred_and_fiftieth_epoch_costs_what_the_fiftieth_did",
    ),
    Mutant(
        "take a stale handle for the newest",
        "state_ops/log_entries.py",
        "return newest if still_there(version) else None",
        "return newest",
        "tests/state_ops/test_registry_upkeep.py::test_a_reader_that_stood_still_reads_what_there_is_now",
    ),
    Mutant(
        "open a version that a zombie's entry stands for",
        "state_ops/delta_log.py",
        " or log_upkeep.may_be_cleaned(log_upkeep.log_names(self.storage, self.path), found.number)",
        "",
        "tests/state_ops/test_registry_upkeep.py::test_an_opener_that_stood_still_takes_a_zombies_entry_for_nobodys",
    ),
    Mutant(
        "put to a table that was made anew",
        "pipelines/runtime/sinks/delta.py",
        " or not log_entries.still_there(left.version)",
        "",
        "tests/runtime/test_delta_sink.py::test_a_table_that_was_made_anew_gets_no_entry_behind_a_gap",
    ),
    Mutant(
        "let a sink's log grow without Delta checkpoints",
        "pipelines/runtime/sinks/delta.py",
        " and not _is_due(self.version.number, self.interval)",
        "",
        "tests/runtime/test_delta_sink.py::test_delta_checkpoints_of_a_sink_that_is_put_to_come_as_often",
    ),
    Mutant(
        "believe that a table has the columns that it had",
        "pipelines/runtime/sinks/delta.py",
        ' and log_entries.newest_after(left.version, "") is not None:',
        ":",
        "tests/runtime/test_delta_sink.py::test_columns_that_somebody_has_added_since_are_seen",
    ),
    Mutant(
        "put to a table whose protocol only delta-rs knows",
        "pipelines/runtime/sinks/delta.py",
        " or handle.protocol().min_writer_version > _WRITER:",
        ":",
        "tests/runtime/test_delta_sink.py::test_a_table_whose_protocol_asks_for_more_is_left_to_delta_rs",
    ),
    Mutant(
        "forget that nothing came before the first checkpoint",
        "state_ops/checkpoint.py",
        "if parent else [[0, 0, 0]]",
        "if parent else []",
        "tests/state_ops/test_lineage.py::test_what_was_begun_before_the_first_checkpoint_is_abandoned",
    ),
    Mutant(
        "ask storage for what the owner has just written",
        "pipelines/runtime/commit.py",
        "    completed = shop.registry.checkpoints(own=True)\n",
        "    completed = shop.registry.checkpoints()\n",
        "tests/runtime/test_requests.py::test_a_warm_epoch_asks_storage_few_things_and_few_one_after_the_other",
    ),
    Mutant(
        "let upkeep that fails fail the commit",
        "state_ops/delta_log.py",
        "        except (DeltaError, OSError) as error:\n            log.warning",
        "        except KeyError as error:\n            log.warning",
        "tests/state_ops/test_registry_upkeep.py::test_upkeep_that_fails_fails_no_commit_and_is_done_later",
    ),
    Mutant(
        "read a registry that lacks a column",
        "state_ops/delta_log.py",
        "if name not in present and name not in self._optional]",
        'if name not in present and name == ""]',
        "tests/state_ops/test_registry_upkeep.py::test_a_table_without_a_needed_column_is_damage",
    ),
    Mutant(
        "clean the log up from its newest end",
        "state_ops/log_upkeep.py",
        "    return sorted(name for name in listed if 0 <= _version(name) < checkpoints[-2])\n",
        "    return sorted((name for name in listed if 0 <= _version(name) < checkpoints[-2]), reverse=True)\n",
        "tests/state_ops/test_registry_upkeep.py::test_a_crash_in_the_clean_up_leaves_an_unbroken_end_of_the_log",
    ),
    Mutant(
        "remember dropped files for a week",
        "state_ops/log_upkeep.py",
        '"interval 0 seconds"',
        '"interval 7 days"',
        "tests/state_ops/test_registry_upkeep.py::test_delta_checkpoints_remember_the_generation_and_no_dropped_files",
    ),
    Mutant(
        "leave an old registry as it is",
        "state_ops/registry.py",
        "            table.upgrade(generation)\n",
        "            pass\n",
        "tests/state_ops/test_registry_upkeep.py::test_a_registry_of_the_first_release_opens_and_goes_on",
    ),
    Mutant(
        "look for running restores before the rows go",
        "state_ops/retention.py",
        "    registry.drop_rows(generation, decided.drop)\n    # Only now, after the rows: a restore that comes later finds no row, one that came before is seen here.\n    held = {hold.commit_id for hold in watcher.live(storage).values()}\n",
        "    held = {hold.commit_id for hold in watcher.live(storage).values()}\n    registry.drop_rows(generation, decided.drop)\n",
        "tests/state_ops/test_pins.py::test_a_restore_that_comes_right_before_the_row_goes_is_seen",
    ),
    Mutant(
        "delete what a running restore reads",
        "state_ops/retention.py",
        "    gone = [stray for stray in strays if stray.commit_id not in held]\n",
        "    gone = list(strays)\n",
        "tests/state_ops/test_pins.py::test_what_a_restore_reads_stays_until_it_is_done",
    ),
    Mutant(
        "look for the row before the hold is there",
        "state_ops/pins.py",
        "        self._write()\n        if not self._registry.holds(self._checkpoint):\n            self._storage.delete(self._path)\n            raise self._gone()\n",
        "        if not self._registry.holds(self._checkpoint):\n            raise self._gone()\n        self._write()\n",
        "tests/state_ops/test_pins.py::test_a_hold_comes_before_the_row_is_looked_at",
    ),
    Mutant(
        "put back a hold that was taken for dead",
        "state_ops/pins.py",
        "                if self._storage.read_bytes(self._path) is None:\n",
        "                if self._done.is_set():\n",
        "tests/state_ops/test_pins.py::test_a_hold_that_was_taken_for_dead_is_not_put_back",
    ),
    Mutant(
        "count savepoints among the retained",
        "state_ops/retention.py",
        "if row.commit_id not in named][-keep:]",
        "][-keep:]",
        "tests/state_ops/test_pins.py::test_a_savepoint_takes_no_place_among_the_retained",
    ),
    Mutant(
        "forget what savepoints name",
        "state_ops/retention.py",
        "for pin in pins if pin.commit_id == row.commit_id]",
        "for pin in pins if pin.commit_id == row.kind]",
        "tests/state_ops/test_pins.py::test_a_name_keeps_a_checkpoint_until_it_is_taken_away",
    ),
    Mutant(
        "name a checkpoint that is gone",
        "state_ops/registry.py",
        "        if all(row.commit_id != pin.commit_id for row in self.checkpoints()):\n",
        "        if not pin.commit_id:\n",
        "tests/state_ops/test_pins.py::test_a_name_is_given_once_and_only_to_what_is_there",
    ),
    Mutant(
        "start from a savepoint unseen",
        "pipelines/runtime/start_from.py",
        "digest=file.digest)",
        "digest=None)",
        "tests/recovery/test_savepoints.py::test_a_damaged_savepoint_starts_nothing",
    ),
    Mutant(
        "go on from a checkpoint that the tables are ahead of",
        "pipelines/runtime/sinks/delta.py",
        "    if version == known:\n",
        "    if version is not None:\n",
        "tests/recovery/test_savepoints.py::test_a_cancelled_pipeline_leaves_only_its_savepoints_if_told_so",
    ),
    Mutant(
        "prune what a sink lacks",
        "pipelines/runtime/commit.py",
        '.append("a sink lacks its rows")',
        ".extend([])",
        "tests/recovery/test_savepoints.py::test_what_a_sink_lacks_is_not_pruned",
    ),
    Mutant(
        "leave what a losing attempt uploaded",
        "pipelines/runtime/commit.py",
        "    remove(shop, flight.losers)\n",
        "",
        "tests/runtime/test_coordination.py::test_case_13_of_two_attempts_that_ack_the_loser_leaves_nothing_behind",
    ),
    Mutant(
        "tolerate slices that cannot be planned for ever",
        "pipelines/runtime/run.py",
        "    loop.coordinator.failed(time.monotonic())\n",
        "",
        "tests/runtime/test_coordination.py::test_a_slice_that_cannot_be_planned_is_a_failure_that_may_be_tolerated",
    ),
    Mutant(
        "let an epoch time out while it is committed",
        "state_ops/coordinator.py",
        "if at >= pending.deadline and not pending.committing:",
        "if at >= pending.deadline:",
        "tests/state_ops/test_coordinator.py::test_a_timeout_takes_the_successors_along_but_no_epoch_that_is_being_committed",
    ),
    Mutant(
        "forget the base of an epoch in flight",
        "state_ops/coordinator.py",
        "        return [id for id in sorted(self._confirmed) if id >= base]",
        "        return [id for id in sorted(self._confirmed) if id > base]",
        "tests/properties/test_coordinator_model.py",
    ),
    Mutant(
        "delete published rows for a late ack",
        "state_ops/coordinator.py",
        "            own = [file for file in own if file.kind != OUTPUT]\n",
        "            pass\n",
        "tests/state_ops/test_coordinator.py::test_rows_that_were_published_are_not_deleted_for_a_late_ack_once_their_checkpoint_is_pruned",
    ),
    Mutant(
        "accept references to objects that nothing confirmed",
        "state_ops/coordinator.py",
        "named.get(file.path) != file.digest for named in confirmed",
        "False for named in confirmed",
        "tests/state_ops/test_coordinator.py::test_an_ack_may_name_its_own_objects_and_those_of_confirmed_checkpoints",
    ),
    Mutant(
        "let the newer survive the older's failure",
        "state_ops/coordinator.py",
        "if pending.id >= id], id",
        "if pending.id == id], id",
        "tests/state_ops/test_coordinator.py::test_case_11_of_two_pending_the_newer_waits_and_falls_with_the_older",
    ),
    Mutant(
        "believe a clock that was set back",
        "state_ops/coordinator.py",
        "self._lost += max(0.0, self._seen - now)",
        "pass",
        "tests/state_ops/test_coordinator.py::test_case_37_a_clock_that_is_set_back_or_forward_aborts_and_triggers_nothing_early",
    ),
    Mutant(
        "take small local files unseen",
        "state_ops/snapshot.py",
        "    return _digest(db / file.name) == file.digest\n",
        "    return True\n",
        "tests/state_ops/test_snapshot.py::test_a_small_local_file_that_rotted_sends_the_whole_fork_to_storage",
    ),
    Mutant(
        "let a full snapshot re-reference",
        "state_ops/snapshot.py",
        "        if not full:\n            return",
        "        if file:\n            return",
        "tests/state_ops/test_uploads.py::test_incremental_and_full_snapshots_follow_each_other_without_conversion",
    ),
    Mutant(
        "discard more than the attempt's own",
        "state_ops/snapshot.py",
        "storage.delete_tree(attempt.prefix)",
        'storage.delete_tree(attempt.prefix.rpartition("/")[0])',
        "tests/state_ops/test_uploads.py::test_discarding_an_attempt_deletes_nothing_of_another_one",
    ),
    Mutant(
        "vouch for a local file that rotted",
        "state_ops/snapshot.py",
        "    if expected is not None and digest != expected:",
        "    if digest is None:",
        "tests/state_ops/test_uploads.py::test_a_full_snapshot_refuses_to_vouch_for_a_local_file_that_rotted",
    ),
    Mutant(
        "open a hostile attempt's directory",
        "state_ops/snapshot.py",
        "    for name in (base.attempt, *(",
        "    for name in ((",
        "tests/state_ops/test_snapshot.py::test_a_hostile_attempt_from_a_registry_is_refused",
    ),
    Mutant(
        "leave what a failed attempt uploaded",
        "pipelines/runtime/keyed_stage.py",
        "    snapshot.discard(storage, attempt)\n    for",
        "    for",
        "tests/state_ops/test_uploads.py::test_an_attempt_that_fails_when_its_state_is_uploaded_leaves_no_object",
    ),
    Mutant(
        "ignore the epoch's deadline in uploads",
        "pipelines/runtime/keyed_stage.py",
        "None if task.seconds is None else time.monotonic() + task.seconds",
        "None",
        "tests/state_ops/test_uploads.py::test_an_attempt_whose_time_is_up_declines_and_leaves_no_object",
    ),
    Mutant(
        "go on uploading after a failure",
        "state_ops/transfers.py",
        "        cancelled.set()\n        for",
        "        for",
        "tests/state_ops/test_uploads.py::test_the_first_failure_stops_the_running_ones_and_the_others_never_begin",
    ),
    Mutant(
        "sweep an earlier epoch in flight",
        "state_ops/sweep.py",
        "mine if settled else (attempt.generation, CheckpointId(0))",
        "mine",
        "tests/state_ops/test_uploads.py::test_an_earlier_epoch_in_flight_on_another_subtask_keeps_its_directory",
    ),
    Mutant(
        "take a full disk for damage",
        "state_ops/backends/rocksdb.py",
        "            if _lacks_room(error):",
        "            if not error:",
        "tests/state_ops/test_uploads.py::test_case_25_disk_full_when_the_state_is_opened",
    ),
    Mutant(
        "report what only one look saw",
        "state_ops/fsck/check.py",
        "findings = [finding for finding in second.findings if _key(finding) in seen_before]",
        "findings = list(first.findings)",
        "tests/recovery/test_fsck.py::test_epochs_that_complete_in_the_middle_of_every_look_are_no_damage",
    ),
    Mutant(
        "read no object's content",
        "state_ops/fsck/check.py",
        "if wanted is not None and (still :=",
        "if wanted is None and (still :=",
        "tests/recovery/test_fsck.py::test_damage_is_found_by_its_name_and_ends_with_code_1",
    ),
    Mutant(
        "take the living generation's work for orphans",
        "state_ops/fsck/objects.py",
        "parsed[0] < seen.fence",
        "parsed[0] <= seen.fence",
        "tests/state_ops/test_fsck.py::test_case_9_what_the_living_generation_stages_is_never_an_orphan",
    ),
    Mutant(
        "take rows that a table once had for orphans",
        "state_ops/fsck/objects.py",
        "if file.path in known or file.path in table.files:",
        "if file.path in table.files:",
        "tests/recovery/test_fsck.py::test_rows_that_the_tables_log_still_mentions_are_no_orphans",
    ),
    Mutant(
        "repair more than was shown",
        "state_ops/fsck/repair.py",
        "if shown is None or fresh.refused is not None:",
        "if True:",
        "tests/recovery/test_fsck.py::test_what_appears_after_the_plan_was_shown_is_left",
    ),
    Mutant(
        "repair although fenced",
        "state_ops/fsck/repair.py",
        "registry.generation() != generation:",
        "registry.generation() < generation:",
        "tests/state_ops/test_fsck.py::test_a_fenced_owner_deletes_nothing",
    ),
    Mutant(
        "repair although nobody can tell what is named",
        "state_ops/fsck/repair.py",
        "    if blocking:\n",
        "    if not report:\n",
        "tests/recovery/test_fsck.py::test_nothing_is_deleted_while_it_cannot_be_told_what_is_named",
    ),
    Mutant(
        "repair away what a restore reads",
        "state_ops/fsck/survey.py",
        "if stray.commit_id in held or seen.alive:",
        "if seen.alive:",
        "tests/recovery/test_fsck.py::test_what_a_running_restore_reads_is_kept",
    ),
    Mutant(
        "overlook that the registry was set back",
        "state_ops/fsck/survey.py",
        "        if generation < newest[1]:",
        "        if generation < 0:",
        "tests/state_ops/test_fsck.py::test_a_registry_that_lost_a_table_is_damage",
    ),
    Mutant(
        "write registry files without checksums",
        "state_ops/delta_log.py",
        "write_statistics=False, write_page_checksum=True",
        "write_statistics=False",
        "tests/recovery/test_fsck.py::test_damage_is_found_by_its_name_and_ends_with_code_1",
    ),
    Mutant(
        "delete what is not Weir's",
        "state_ops/retention.py",
        " and file.path not in named and is_staged(file.path):",
        " and file.path not in named:",
        "tests/state_ops/test_retention.py::test_only_older_generations_have_orphans_and_only_state_and_channels",
    ),
    Mutant(
        "merge whatever is due at once",
        "state_ops/backends/shards.py",
        "        if not chosen or shards[index].bytes <= left:",
        "        if True:",
        "tests/state_ops/test_compaction.py::test_overdue_shards_are_merged_by_need_within_an_eighth_of_the_state",
    ),
    Mutant(
        "never cut a state",
        "state_ops/backends/rocksdb.py",
        "            if number > 1 and (new",
        "            if number > 99 and (new",
        "tests/state_ops/test_compaction.py::test_a_state_above_the_threshold_is_cut_into_eight_even_pieces",
    ),
    Mutant(
        "wait for compactions that never start",
        "state_ops/backends/rocksdb.py",
        "                quiet += 1",
        "                quiet = 0",
        "tests/state_ops/test_compaction.py::test_an_epoch_does_not_wait_for_a_merge_that_rocksdb_calls_pending_but_never_starts",
    ),
    Mutant(
        "take damage for something that passes",
        "state_ops/backends/rocksdb.py",
        '        if str(error).startswith("Corruption"):',
        "        if not error:",
        "tests/state_ops/test_compaction.py::test_a_merge_that_meets_a_damaged_file_says_damage",
    ),
    Mutant(
        "let a zombie blame its input",
        "pipelines/runtime/in_flight.py",
        "            raise_if_fenced(self._shop, failure.error)\n",
        "            pass\n",
        "tests/recovery/test_racers.py::test_a_zombie_whose_staged_rows_its_successor_removed_says_that_it_is_fenced",
    ),
    Mutant(
        "leave what a zombie staged below the head",
        "pipelines/runtime/tenure.py",
        "parsed[0] < shop.generation and is_abandoned(head, *parsed)",
        "parsed[0] < shop.generation and (head is None or parsed[1] > head.id)",
        "tests/recovery/test_racers.py::test_what_a_zombie_staged_below_the_head_is_removed_by_the_next_take_over",
    ),
    Mutant(
        "take any generation's epoch for the head's own",
        "state_ops/checkpoint.py",
        "any(owner == generation and first <= epoch <= last for owner, first, last in head.lineage)",
        "any(first <= epoch <= last for _, first, last in head.lineage)",
        "tests/state_ops/test_lineage.py::test_what_the_lineage_does_not_name_is_abandoned",
    ),
    Mutant(
        "clean the registry up without proof of owning it",
        "state_ops/registry.py",
        "                table.commit(generation)\n",
        "                pass\n",
        "tests/recovery/test_racers.py::test_a_zombie_that_cleans_up_leaves_what_its_successor_is_about_to_commit",
    ),
    Mutant(
        "remove the probe of a taker at work",
        "state_ops/delta_log.py",
        "if name.startswith(PROBE) and not name.startswith(current):",
        "if name.startswith(PROBE):",
        "tests/recovery/test_racers.py::test_a_taker_whose_probe_is_taken_for_a_dead_one_s_says_that_it_lost",
    ),
    Mutant(
        "put without the condition",
        "state_ops/object_store.py",
        'obstore.put(self._once, path, data, mode="create")',
        "obstore.put(self._once, path, data)",
        "tests/storage/test_contract.py::test_of_two_that_create_a_file_the_second_is_told",
    ),
    Mutant(
        "pass a store that takes a second conditional put",
        "state_ops/delta_log.py",
        'if not storage.create(f"{path}/put", b"second"):',
        'if storage.create(f"{path}/put", b"second") or True:',
        "tests/storage/test_engine.py::test_a_store_that_takes_a_second_conditional_put_is_refused",
    ),
    Mutant(
        "follow links out of the root",
        "state_ops/stores.py",
        "not os.path.realpath(at).startswith(",
        "not at.startswith(",
        "tests/storage/test_contract.py::test_links_that_lead_out_of_the_root_are_not_followed",
    ),
    Mutant(
        "take half a listing",
        "state_ops/storage.py",
        "lambda: list(self.store.list(_directory(path)))",
        "lambda: self.store.list(_directory(path))",
        "tests/storage/test_faults.py::test_a_listing_is_complete_or_an_error",
    ),
    Mutant(
        "retry what will not pass",
        "state_ops/object_store.py",
        "if status is None or status in _MAY_PASS or code in _CODES_THAT_MAY_PASS:",
        "if True:",
        "tests/storage/test_faults.py::test_case_24_what_will_not_pass_fails_at_once",
    ),
    Mutant(
        "never retry",
        "state_ops/storage.py",
        "attempts=self._s3.max_attempts",
        "attempts=1",
        "tests/storage/test_faults.py::test_case_24_what_may_pass_is_tried_again",
    ),
    Mutant(
        "let an epoch be aborted before the next one is due",
        "configs/combinations.py",
        "    if timeout < interval:\n",
        "    if False:\n",
        "tests/test_settings.py::test_settings_that_contradict_each_other_are_named_with_their_values_and_what_to_do",
    ),
    Mutant(
        "tell one contradiction at a time",
        "configs/combinations.py",
        "for rule in RULES for found in rule(settings)]",
        "for rule in RULES for found in rule(settings)][:1]",
        "tests/test_settings.py::test_contradictions_come_all_at_once_with_where_both_sides_were_said",
    ),
    Mutant(
        "take a literal secret",
        "configs/sections.py",
        "if not isinstance(name, str) or not _VARIABLE.fullmatch(name):",
        "if False:",
        "tests/storage/test_secrets.py::test_a_literal_secret_is_refused_and_not_repeated",
    ),
    Mutant(
        "leave a killed coordinator's half-written lease",
        "pipelines/runtime/tenure.py",
        "        lease.remove_unfinished(storage)\n",
        "",
        "tests/recovery/test_matrix.py::test_half_a_file_that_a_killed_coordinator_left_is_removed_by_the_next",
    ),
    Mutant(
        "let errors of Delta logs end a run untyped",
        "pipelines/runtime/tenure.py",
        "    except (OSError, DeltaError) as error:",
        "    except OSError as error:",
        "tests/recovery/test_matrix.py::test_what_storage_raises_outside_of_an_epoch_ends_the_run_with_a_typed_error",
    ),
    Mutant(
        "remove leftovers without proof of owning",
        "pipelines/runtime/tenure.py",
        "    shop.registry.prove(shop.generation)\n",
        "",
        "tests/recovery/test_racers.py::test_a_zombie_that_cleans_up_leaves_the_tables_of_a_pipeline_that_was_cancelled",
    ),
    Mutant(
        "take published rows for leftovers",
        "pipelines/runtime/tenure.py",
        "        if delta.astray(shop.storage, shop.pipeline.app_id, sink.table, head) is not None:\n",
        "        if delta.astray(shop.storage, shop.pipeline.app_id, sink.table, head) == '':\n",
        "tests/recovery/test_savepoints.py::test_a_cancelled_pipeline_can_still_be_pruned_and_cancelled_and_its_tables_stay",
    ),
    Mutant(
        "take over from who started meanwhile",
        "pipelines/runtime/tenure.py",
        "take_over(after=before)",
        "take_over()",
        "tests/recovery/test_racers.py::test_a_command_that_saw_nobody_takes_nothing_from_a_coordinator_that_started_meanwhile",
    ),
    Mutant(
        "do only the oldest of several stops",
        "pipelines/runtime/run.py",
        "for request in requests if request.kind == upkeep.STOP and (stop.drain or not request.drain)",
        "for request in (stop,)",
        "tests/recovery/test_savepoints.py::test_of_two_stops_at_one_barrier_both_are_done",
    ),
    Mutant(
        "say of a stop that came too late that it was done",
        "pipelines/runtime/stopping.py",
        " and storage.read_bytes(sent.name) is None",
        "",
        "tests/recovery/test_savepoints.py::test_a_stop_that_came_after_the_last_barrier_is_not_taken_for_done",
    ),
    Mutant(
        "name a checkpoint for nobody",
        "pipelines/runtime/epoch.py",
        "request.kind == upkeep.NAME and asked_still:",
        "request.kind == upkeep.NAME:",
        "tests/recovery/test_savepoints.py::test_a_savepoint_whose_asker_lost_patience_is_not_taken",
    ),
    Mutant(
        "stop at what a newer release has left",
        "state_ops/pins.py",
        "lease.known(Held, json.loads(raw))",
        "Held(**json.loads(raw))",
        "tests/recovery/test_savepoints.py::test_what_a_newer_release_writes_for_the_coordinator_stops_no_run",
    ),
    Mutant(
        "take an own claim for another's",
        "state_ops/delta_log.py",
        "if generation is not None and old == mine:",
        "if False:",
        "tests/recovery/test_racers.py::test_a_claim_that_landed_and_reported_an_error_is_ours",
    ),
    Mutant(
        "go on from a checkpoint whose objects are gone",
        "pipelines/runtime/tenure.py",
        "        _check_objects(shop, head)\n",
        "        pass\n",
        "tests/recovery/test_cases.py::test_case_22_local_copies_do_not_hide_that_the_newest_checkpoint_lost_an_object",
    ),
    Mutant(
        "delete somebody's files among staged rows",
        "pipelines/runtime/tenure.py",
        "                found += [file.path for file in files if is_staged_rows(file.path)]\n",
        "                found += [file.path for file in files]\n",
        "tests/recovery/test_cases.py::test_somebodys_files_among_staged_rows_are_left_alone",
    ),
    Mutant(
        "the cache puts entries that were only read",
        "state_ops/cache.py",
        "        values = [self._l1[key] for key in keys]\n",
        "        values = [self._l1[key] for key in keys]\n        self._dirty |= dict.fromkeys(keys)\n",
        "tests/state_ops/test_worked_example_2.py::test_what_was_only_read_is_never_put",
    ),
    Mutant(
        "what the cache has flushed stays dirty",
        "state_ops/cache.py",
        "            del self._dirty[key]\n",
        "            self._dirty[key]\n",
        "tests/state_ops/test_worked_example_2.py::test_one_layer",
    ),
    Mutant(
        "a hit does not make an entry the most recently used one",
        "state_ops/cache.py",
        "        self._l1.move_to_end(key)\n        self._l1_hits += 1\n",
        "        self._l1_hits += 1\n",
        "tests/state_ops/test_cache.py::test_a_read_is_a_use",
    ),
    Mutant(
        "an entry that moves to L2 is not put at once",
        "state_ops/cache.py",
        "        dirty = {key: value for key, value in leaving if key in self._dirty}\n",
        "        dirty = {key: value for key, value in leaving if key in self._dirty and not self._l2_size}\n",
        "tests/state_ops/test_worked_example_2.py::test_two_layers",
    ),
    Mutant(
        "the cache forgets that a write has failed",
        "state_ops/cache.py",
        "            self._failure = _typed(error)\n            if self._failure is error:\n                raise\n"
        "            raise self._failure from error\n",
        "            raise _typed(error) from error\n",
        "tests/state_ops/test_cache.py::test_a_flush_that_fails_is_fatal_with_a_typed_error",
    ),
    Mutant(
        "a worker's warm cache is taken for that of another attempt",
        "state_ops/warm.py",
        "kept is not None and kept.attempt == attempt",
        "kept is not None",
        "tests/state_ops/test_cache.py::test_a_thing_of_another_snapshot_is_dropped",
    ),
    Mutant(
        "take the snapshot before the cache is flushed",
        "pipelines/runtime/keyed_stage.py",
        "            caching.barrier()\n",
        "",
        "tests/runtime/test_per_key.py::test_each_key_is_called_with_its_rows_and_its_state",
    ),
    Mutant(
        "take over a warm cache of another state class",
        "pipelines/runtime/caching.py",
        "held is not None and held[0] == self._shape",
        "held is not None",
        "tests/runtime/test_per_key.py::test_entries_of_another_state_class_are_not_taken_over",
    ),
    Mutant(
        "keep what a per-key function changes after its update",
        "state_ops/per_key.py",
        "row if self._plain else tuple(map(own, row))",
        "row",
        "tests/runtime/test_per_key.py::test_clear_forgets_and_what_is_changed_without_update_is_not_kept",
    ),
    Mutant(
        "cache what the function gave, not what is stored",
        "state_ops/per_key.py",
        "[*as_stored(table, self._fields, rows), *[None] * len(gone)]",
        "[*rows, *[None] * len(gone)]",
        "tests/runtime/test_per_key.py::test_state_of_every_type_is_the_same_with_a_cache_as_without",
    ),
    Mutant(
        "read a file of entries without its digest",
        "state_ops/backends/entries.py",
        "        if left or stored.read() != hashed.digest() + _END:",
        "        if left:",
        "tests/state_ops/test_backends.py::test_a_file_of_entries_that_is_not_what_was_written_is_damage",
    ),
    Mutant(
        "let state in memory grow past its limit",
        "state_ops/backends/memory.py",
        "        if bytes > max(self._limit, self._bytes):",
        "        if bytes < 0:",
        "tests/state_ops/test_backends.py::test_past_its_limit_memory_says_what_to_do_and_stays_as_it_was",
    ),
    Mutant(
        "sort all keys again at each scan",
        "state_ops/backends/memory.py",
        "        while len(self._runs) > 1 and len(self._runs[-2]) <= 2 * len(self._runs[-1]):",
        "        while len(self._runs) > 1:",
        "tests/state_ops/test_backends.py::test_scans_between_writes_do_not_sort_the_whole_state_again",
    ),
    Mutant(
        "link what a backend changes in place",
        "state_ops/snapshot.py",
        "    if immutable:\n        os.link(local, db / file.name)",
        "    if file.name:\n        os.link(local, db / file.name)",
        "tests/state_ops/test_backends.py::test_a_snapshot_stays_what_it_is_while_forks_of_it_go_on[sqlite]",
    ),
    Mutant(
        "open state with whatever backend is configured",
        "pipelines/runtime/stage_job.py",
        "    _check_backend(shop, stage)\n",
        "",
        "tests/recovery/test_backends.py::test_another_backend_is_refused_before_the_first_row",
    ),
    Mutant(
        "give every database a cache of its own",
        "state_ops/backends/budget.py",
        "blocks.set_block_cache(budget.cache)",
        "blocks.set_block_cache(Cache(8 << 20))",
        "tests/state_ops/test_memory.py::test_blocks_index_and_filters_are_in_the_common_cache_and_not_beside_it",
    ),
    Mutant(
        "give every database memtables of its own",
        "state_ops/backends/rocksdb.py",
        "            if self._budget.memtables.get_usage() > self._budget.memtable_bytes:",
        "            if self._budget.memtables.get_usage() < 0:",
        "tests/state_ops/test_memory.py::test_memtables_of_all_databases_together_keep_to_one_share",
    ),
    Mutant(
        "keep the older of two partials' sums only",
        "state_ops/folding.py",
        "    rankings = {rank_of(name): agg.rank_columns(name)[1] for name, agg in aggregates}\n",
        '    rankings = {}\n    parts = parts.unique(by, keep="first")\n'
        "    rankings = {rank_of(name): agg.rank_columns(name)[1] for name, agg in aggregates}\n",
        "tests/runtime/test_aggregation.py::test_each_barrier_hands_out_one_row_for_every_key_that_the_epoch_touched",
    ),
    Mutant(
        "let sums of integers wrap around",
        "state_ops/aggregates.py",
        "    return pl.Float64() if type.is_float() else pl.Int128()\n",
        "    return pl.Float64() if type.is_float() else pl.Int64()\n",
        "tests/runtime/test_aggregation.py::test_a_sum_that_does_not_fit_is_refused_and_changes_nothing",
    ),
    Mutant(
        "take the newest batch's last row for the last",
        "state_ops/aggregates.py",
        "        return pl.col(new + name).is_not_null() & (pl.col(old + name).is_null() | better)\n",
        "        return pl.col(new + name).is_not_null()\n",
        "tests/runtime/test_aggregation.py::test_first_and_last_are_by_the_order_columns_of_all_input",
    ),
    Mutant(
        "count a row that is late for one of its windows in none",
        "pipelines/runtime/operators/windows.py",
        "            late = last <= self._progress.before ",
        "            late = first <= self._progress.before ",
        "tests/runtime/test_windows.py::test_of_overlapping_windows_a_row_counts_in_those_that_are_open",
    ),
    Mutant(
        "open windows again that have closed",
        "pipelines/runtime/operators/windows.py",
        "            fresh = fresh.filter(pl.col(_WINDOW) > self._progress.before)\n",
        "            fresh = fresh.filter(pl.lit(True))\n",
        "tests/runtime/test_windows.py::test_of_overlapping_windows_a_row_counts_in_those_that_are_open",
    ),
    Mutant(
        "judge rows of sessions one by one",
        "pipelines/runtime/operators/sessions.py",
        "        ended = both.filter(pl.col(_TO).max().over(_SESSION) <= self._progress.before)[_ROW].drop_nulls()\n",
        "        ended = both.filter(pl.col(_TO) <= self._progress.before)[_ROW].drop_nulls()\n",
        "tests/runtime/test_windows.py::test_a_row_that_belongs_to_an_open_session_is_not_late",
    ),
    Mutant(
        "forget to move a session in the index",
        "pipelines/runtime/operators/sessions.py",
        "deletes + self._entries(keys.filter(gone), before[gone]))",
        "deletes)",
        "tests/runtime/test_windows.py::test_the_index_has_one_entry_for_each_key_with_open_sessions",
    ),
    Mutant(
        "consult what has expired until it is swept away",
        "pipelines/runtime/operators/deduplication.py",
        "        new = np.flatnonzero(~known | expired)\n",
        "        new = np.flatnonzero(~known)\n",
        "tests/runtime/test_deduplication.py::test_forgetting_is_bounded_and_what_has_expired_is_not_consulted",
    ),
    Mutant(
        "bytes behind a null in a list are stored",
        "state_ops/nested.py",
        "        if nulls is not None and len(starts) and",
        "        if nulls is None and len(starts) and",
        "tests/state_ops/test_codec.py::test_bytes_behind_a_null_in_a_list_leave_no_trace",
    ),
    Mutant(
        "a field takes the values of one that is still there",
        "state_ops/evolution.py",
        "if old in before and old not in taken)",
        "if old in before)",
        "tests/state_ops/test_evolution.py::test_an_old_name_that_is_another_fields_now_is_not_taken_for_the_renamed_one",
    ),
    Mutant(
        "an integer is widened to a float that cannot hold it",
        "state_ops/evolution.py",
        "_MANTISSA = {16: 11, 32: 24, 64: 53}",
        "_MANTISSA = {16: 11, 32: 24, 64: 64}",
        "tests/state_ops/test_evolution.py::test_what_could_lose_a_value_is_an_obstacle",
    ),
    Mutant(
        "a checkpoint forgets the schemas before its own",
        "pipelines/runtime/epoch.py",
        '"schemas": evolution.recorded(fixed.state) if fixed else [],',
        '"schemas": evolution.recorded(fixed.state)[-1:] if fixed else [],',
        "tests/recovery/test_evolution.py::test_add_drop_widen_rename_and_reorder_over_three_classes",
    ),
    Mutant(
        "a changed class is not compared with its state",
        "pipelines/runtime/stage_job.py",
        "    problems = evolution.obstacles(stored, fixed.state)\n",
        "    problems: list[str] = []\n",
        "tests/recovery/test_evolution.py::test_other_changes_are_refused_before_the_first_row",
    ),
    Mutant(
        "give all elements of one append the same number",
        "state_ops/lists.py",
        "        self._next += np.bincount(codes, minlength=len(batch))\n",
        "        self._next += 1\n",
        "tests/runtime/test_state_kinds.py::test_a_state_may_be_lists_alone",
    ),
    Mutant(
        "leave a fired timer in the index by key",
        "state_ops/timers.py",
        "[*batch.encoded(by_time, codes, [moments]), *batch.encoded(of_key, codes, [], [moments])]",
        "batch.encoded(by_time, codes, [moments])",
        "tests/runtime/test_state_kinds.py::test_a_timer_that_is_taken_back_while_it_waits_does_not_fire_and_nothing_of_it_stays",
    ),
    Mutant(
        "fire what was due before the author cleared it",
        "pipelines/runtime/operators/function.py",
        "if self._timers.disturbed:",
        "if False:",
        "tests/runtime/test_state_kinds.py::test_a_timer_that_is_taken_back_while_it_waits_does_not_fire_and_nothing_of_it_stays",
    ),
    Mutant(
        "drain only what is due",
        "pipelines/runtime/operators/function.py",
        "upto = None if drain else clock",
        "upto = clock",
        "tests/runtime/test_state_kinds.py::test_timers_wait_for_the_watermark_and_a_drain_does_not",
    ),
    Mutant(
        "keep state for a moment longer than its TTL",
        "state_ops/ttl.py",
        "stamps > self.now - self.ttl.micros",
        "stamps >= self.now - self.ttl.micros",
        "tests/runtime/test_state_kinds.py::test_reading_keeps_state_alive_if_it_is_to",
    ),
    Mutant(
        "forget state that has no stamp yet",
        "state_ops/ttl.py",
        "stamps = touched.fill_null(self.now)",
        "stamps = touched.fill_null(0)",
        "tests/properties/test_kinds_of_state.py::test_a_ttl_that_comes_or_goes_loses_nothing",
    ),
    Mutant(
        "begin the sweep anew in each epoch",
        "pipelines/runtime/operators/function.py",
        "self.swept = None if after is None else after.hex()",
        "self.swept = None",
        "tests/runtime/test_state_kinds.py::test_the_sweep_is_bounded_goes_on_where_it_stood_and_writes_nothing_for_nothing",
    ),
    Mutant(
        "what a drain has set and holds back is let go when it is set again",
        "state_ops/timers.py",
        "            held = np.where(due, 0, np.array(before, np.int64))",
        "            held = np.where(due | np.array([one is not None for one in self._timers.get(timers)]), 0, self._epoch)",
        "tests/runtime/test_state_kinds.py::test_a_drain_does_not_fire_what_it_had_set_itself_however_often_it_is_set",
    ),
    Mutant(
        "downstream goes by event time that the stage before has not closed by",
        "pipelines/runtime/watermarks.py",
        "    return known if holds_back and not drain else after",
        "    return after",
        "tests/runtime/test_operators_run.py::test_windows_of_windows_lose_nothing_whether_files_tell_their_newest_event_time_or_not",
    ),
    Mutant(
        "upload what the epoch before has not confirmed",
        "pipelines/runtime/in_flight.py",
        "            and self._free(_UPLOADS, flight, stage.uid)\n            and self._follows_confirmed(flight)",
        "            and self._free(_UPLOADS, flight, stage.uid)",
        "tests/recovery/test_schedules.py::test_every_checkpoint_of_a_schedule_is_a_replay_of_its_files",
    ),
    Mutant(
        "read the next stage's rows from what has been uploaded",
        "pipelines/runtime/stage_job.py",
        "    acks = flight.acks[upstream]\n",
        "    acks = flight.pending.acks_of(upstream)\n",
        "tests/recovery/test_schedules.py::test_every_checkpoint_of_a_schedule_is_a_replay_of_its_files",
    ),
    Mutant(
        "go on from the frontier of an epoch that fell",
        "pipelines/runtime/in_flight.py",
        "        self.frontier = Frontier.at(head)\n        files",
        "        self.frontier = self.frontier if head else Frontier.at(head)\n        files",
        "tests/recovery/test_schedules.py::test_every_checkpoint_of_a_schedule_is_a_replay_of_its_files",
    ),
    Mutant(
        "sweep away what is being uploaded",
        "pipelines/runtime/keyed_stage.py",
        " | task.keep\n",
        "\n",
        "tests/recovery/test_schedules.py::test_every_checkpoint_of_a_schedule_is_a_replay_of_its_files",
    ),
    Mutant(
        "believe that Spark has routed the rows",
        "pipelines/runtime/spark_task.py",
        "        if batch.num_rows:\n            found = pc.min_max",
        "        if False:\n            found = pc.min_max",
        "tests/runtime/test_spark_executor.py::test_rows_that_spark_has_routed_elsewhere_are_refused_before_any_is_applied[partitions swapped]",
    ),
    Mutant(
        "look at the lowest key group of a batch alone",
        "pipelines/runtime/spark_task.py",
        "if low not in own or high not in own:",
        "if low not in own:",
        "tests/runtime/test_spark_executor.py::test_rows_that_spark_has_routed_elsewhere_are_refused_before_any_is_applied[partitions joined]",
    ),
    Mutant(
        "take a plan without rows for lost tasks",
        "pipelines/runtime/spark_executor.py",
        "            if not acks:\n",
        "            if False:\n",
        "tests/runtime/test_spark_executor.py::test_every_subtask_acks_when_no_row_is_taken[as Spark sees in the plan]",
    ),
    Mutant(
        "leave a worker's input unread",
        "pipelines/runtime/spark_task.py",
        "    for _ in numbers:\n        pass\n",
        "",
        "tests/runtime/test_spark_executor.py::test_every_subtask_acks_an_epoch_without_data_and_its_worker_lives_on",
    ),
    Mutant(
        "collect a worker's modules after every task",
        "pipelines/runtime/spark_task.py",
        "    gc.freeze()\n",
        "",
        "tests/runtime/test_spark_executor.py::test_a_worker_does_not_collect_its_modules_after_every_task",
    ),
    Mutant(
        "let a source that cannot be planned end what is in flight",
        "pipelines/runtime/run.py",
        "                if air.empty:\n                    _not_planned(loop, error)\n",
        "                _not_planned(loop, error)\n",
        "tests/recovery/test_overlap.py::test_a_source_that_cannot_be_planned_costs_nothing_that_is_in_flight",
    ),
    Mutant(
        "forget what is being read when a drain is asked for",
        "pipelines/runtime/run.py",
        "loop.to_drain = waiting | air.reading",
        "loop.to_drain = waiting",
        "tests/recovery/test_overlap.py::test_what_a_failed_epoch_was_reading_is_read_before_a_drain",
    ),
    Mutant(
        "count every epoch that falls as a failure",
        "pipelines/runtime/in_flight.py",
        "            self._coordinator.count(time.monotonic(), self._failures_before + 1)\n",
        "            pass\n",
        "tests/recovery/test_overlap.py::test_several_epochs_that_fall_for_one_reason_are_one_failure",
    ),
    Mutant(
        "let an epoch pay for the one before",
        "pipelines/runtime/in_flight.py",
        "            self._prolong(follower)\n",
        "            pass\n",
        "tests/recovery/test_overlap.py::test_the_time_that_an_epoch_waits_for_the_one_before_is_not_its_own",
    ),
    Mutant(
        "upload however much waits",
        "pipelines/runtime/in_flight.py",
        "not in flight.elsewhere and not self._is_full",
        "not in flight.elsewhere",
        "tests/recovery/test_overlap.py::test_bytes_that_wait_for_the_store_hold_the_source_back",
    ),
    Mutant(
        "raise a failure before what ended well is told",
        "pipelines/runtime/in_flight.py",
        "(self._steps or self._flights or self._reports)",
        "(self._steps or self._flights)",
        "tests/recovery/test_overlap.py::test_an_epoch_that_ended_well_is_told_before_the_failure_of_the_next",
    ),
    Mutant(
        "hand an epoch on in part",
        "pipelines/runtime/unapplied.py",
        "    if not first.closed:\n",
        "    if not first.closed and not first.layers:\n",
        "tests/recovery/test_unaligned.py::test_what_comes_out_is_what_an_aligned_run_makes_of_the_same_epochs",
    ),
    Mutant(
        "close windows although rows of the epoch are still to come",
        "pipelines/runtime/keyed_stage.py",
        "operator.pause() if stopped or task.unfinished else operator.barrier()",
        "operator.barrier()",
        "tests/recovery/test_unaligned.py::test_what_comes_out_is_what_an_aligned_run_makes_of_the_same_epochs",
    ),
    Mutant(
        "judge lateness by the watermark of an epoch that is not applied",
        "pipelines/runtime/stage_job.py",
        "        if left is None:\n            after = ",
        "        if True:\n            after = ",
        "tests/recovery/test_unaligned.py::test_what_comes_out_is_what_an_aligned_run_makes_of_the_same_epochs",
    ),
    Mutant(
        "apply rows that wait without looking at their digest",
        "pipelines/runtime/stage_job.py",
        "if data is None or hashlib.sha256(data).hexdigest() != file.digest:",
        "if data is None:",
        "tests/recovery/test_unaligned.py::test_damaged_rows_are_never_applied",
    ),
    Mutant(
        "leave rows that wait out of the listing",
        "pipelines/runtime/epoch.py",
        "    files += _carried(flight, files, channels)\n",
        "",
        "tests/recovery/test_unaligned.py::test_rows_that_wait_are_named_like_state_and_go_when_they_are_applied",
    ),
    Mutant(
        "forget what waits beyond one epoch",
        "pipelines/runtime/unapplied.py",
        "    return replace(done.first, layers=layers, schema=columns, begun=True) if layers else None\n",
        "    return None\n",
        "tests/recovery/test_unaligned.py::test_what_comes_out_is_what_an_aligned_run_makes_of_the_same_epochs",
    ),
    Mutant(
        "remove rows from the local disk while they wait",
        "pipelines/runtime/in_flight.py",
        "        self._kept = [ack for ack in ended if not read.isdisjoint(handover.locals_of(ack))]\n",
        "        self._kept = []\n",
        "tests/recovery/test_unaligned.py::test_what_comes_out_is_what_an_aligned_run_makes_of_the_same_epochs",
    ),
    Mutant(
        "name a checkpoint in front of which rows wait",
        "pipelines/runtime/run.py",
        "only_waiting or named is not None or max(behind.values())",
        "only_waiting or max(behind.values())",
        "tests/recovery/test_unaligned.py::test_what_gets_a_name_leaves_no_rows_behind",
    ),
    Mutant(
        "read on however far a stage is behind",
        "pipelines/runtime/run.py",
        "max(behind.values()) >= shop.settings.checkpoints.max_waiting_epochs",
        "False",
        "tests/recovery/test_unaligned.py::test_no_further_slice_is_read_while_a_stage_is_too_far_behind",
    ),
    Mutant(
        "let an older release lose rows that wait",
        "pipelines/runtime/epoch.py",
        "format_version=WITH_WAITING if any(flight.waiting.values()) else FORMAT_VERSION",
        "format_version=FORMAT_VERSION",
        "tests/recovery/test_unaligned.py::test_a_restore_goes_on_with_what_a_checkpoint_has_not_applied",
    ),
]


def main() -> int:
    chosen = [mutant for mutant in MUTANTS if not sys.argv[1:] or any(word in mutant.name for word in sys.argv[1:])]
    if not chosen:
        print(f"No mutant's name has any of these words: {' '.join(sys.argv[1:])}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="weir-mutants-") as scratch:
        tree = Path(scratch) / "tree"
        _copy(tree)
        tests = sorted({mutant.test for mutant in chosen})
        print(f"{len(tests)} named tests on the unbroken tree")
        if not _passes(tree, tests, shown=True):
            print("they do not pass as they are: nothing can be learned from mutants", file=sys.stderr)
            return 1
        survivors = [mutant.name for mutant in chosen if not _is_killed(tree, mutant)]
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutants killed")
    for name in survivors:
        print(f"  survived: {name}", file=sys.stderr)
    return 1 if survivors else 0


def _copy(tree: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)


def _is_killed(tree: Path, mutant: Mutant) -> bool:
    file = tree / mutant.file
    text = file.read_text()
    if text.count(mutant.old) != 1:
        print(f"  ?  {mutant.name}: its line stands {text.count(mutant.old)} times in {mutant.file}", file=sys.stderr)
        return False
    started = time.monotonic()
    file.write_text(text.replace(mutant.old, mutant.new))
    try:
        killed = not _passes(tree, [mutant.test])
    finally:
        file.write_text(text)
    print(
        f"  {'killed  ' if killed else 'SURVIVED'}  {time.monotonic() - started:5.1f} s  {mutant.name}  [{mutant.test}]"
    )
    return killed


def _passes(tree: Path, tests: list[str], *, shown: bool = False) -> bool:
    """Exit 0 is a pass and 1 a failing test; anything else (no such test, a broken import) says nothing about the tests."""
    command = [sys.executable, "-B", "-m", "pytest", "-x", "-q", "--no-header", *tests]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=900)
    if done.returncode not in (0, 1):
        raise SystemExit(
            f"pytest could not run {tests} (exit {done.returncode}):\n{done.stdout[-3000:]}{done.stderr[-1000:]}"
        )
    if shown and done.returncode:
        print(done.stdout[-3000:], file=sys.stderr)
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
